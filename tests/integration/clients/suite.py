"""``python -m tests.integration.clients.suite NAME=PYTHON...``: clients that others wrote.

Each runs by the interpreter that it is installed for, against one prefill and one decode worker
with SmolLM2. ``make clients`` and ``make clients-long`` say which. Ends with 1 where one of them
is not content.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from diptych.client import DiptychClient, SamplingOptions
from tests.cluster import running_cluster
from tests.golden.models import smollm2_folder
from tests.integration.clients.capitals import TASK, write_task

HERE: Final = Path(__file__).parent
MODEL: Final = "demo"
MOST_S: Final = 1800
CLOSE: Final = 1e-3  # log probabilities
NOTHING_FETCHED: Final = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
SAMPLING: Final = SamplingOptions(temperature=0, max_tokens=12, ignore_eos=True)


class Server(NamedTuple):
    """Where the cluster is, and where its clients may write."""

    grpc_address: str
    url: str
    """Of the HTTP API; ends with /v1."""
    folder: Path
    """The model's."""
    work: Path

    def ask_by(self, python: str, script: str, *args: str) -> str:
        """What a script of this folder prints, which sees none of the others.

        Raises CalledProcessError.
        """
        fetched = {**NOTHING_FETCHED, "HF_HOME": str(self.work / "hub")}
        done = subprocess.run(
            [str(Path(python).absolute()), "-P", str(HERE / script), *args],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            timeout=MOST_S,
            cwd=self.work,
            env={**os.environ, **fetched, "PYTHONPATH": ""},
        )
        return done.stdout


def openai(server: Server, python: str) -> str:
    """All that it is served, each in both ways."""
    server.ask_by(python, "by_openai.py", server.url, MODEL)
    return "models, chats, a form, completions, responses, vectors, a refusal"


def tritonclient(server: Server, python: str) -> str:
    """It is answered what our own client is."""
    told = json.loads(server.ask_by(python, "by_triton.py", server.grpc_address, MODEL))
    (text,), (echoed,) = (told["answers"][name]["text_output"] for name in ("alone", "echoed"))
    expected = asyncio.run(_ask(server.grpc_address, echoed.removesuffix(text)))
    assert text == expected, (text, expected)
    assert told["answers"]["choices"]["text_output"] == [text, text]
    for name, pieces in (("pieces", told["stream"]), ("0", told["example"])):
        came = [each["text_output"][0] for each in pieces if each.get("id") == name]
        assert "".join(came) == text, (came, text)
    codes = {name: refused["status"] for name, refused in told["refusals"].items()}
    assert not {"none", "StatusCode.UNKNOWN", "StatusCode.INTERNAL"} & set(codes.values()), codes
    return f"whole, two choices, streams, {len(codes)} refusals"


async def _ask(address: str, prompt: str) -> str:
    async with DiptychClient(address) as client:
        return "".join([each.text async for each in client.generate(prompt, options=SAMPLING)])


def litellm(server: Server, python: str) -> str:
    """Whole, streamed, vectors, a refusal."""
    server.ask_by(python, "by_litellm.py", server.url, MODEL)
    return "whole, streamed, vectors, a refusal"


def langchain_openai(server: Server, python: str) -> str:
    """Whole, streamed, a schema, vectors."""
    server.ask_by(python, "by_langchain.py", server.url, MODEL)
    return "whole, streamed, a schema, vectors"


def lm_eval(server: Server, python: str) -> str:
    """The same scores as transformers in one process."""
    write_task(server.work)
    remote = f"model={MODEL},base_url={server.url}/completions,tokenizer={server.folder}"
    asked = (
        ("local-completions", f"{remote},tokenized_requests=True,num_concurrent=1,max_retries=1"),
        ("hf", f"pretrained={server.folder},dtype=float32,device=cpu"),
    )
    ours, theirs = (
        json.loads(
            server.ask_by(python, "by_lm_eval.py", *each, str(server.work), TASK).splitlines()[-1]
        )
        for each in asked
    )
    assert ours["figures"] == theirs["figures"], (ours["figures"], theirs["figures"])
    differences = [
        abs(one - another)
        for mine, other in zip(ours["logprobs"], theirs["logprobs"], strict=True)
        for one, another in zip(mine, other, strict=True)
    ]
    assert max(differences) < CLOSE, max(differences)
    num_scored = len(differences)
    return f"{ours['figures']}; {num_scored} log probabilities within {max(differences):.1e}"


CLIENTS: Final[dict[str, Callable[[Server, str], str]]] = {
    "openai": openai,
    "tritonclient": tritonclient,
    "litellm": litellm,
    "langchain-openai": langchain_openai,
    "lm-eval": lm_eval,
}


def main(*named: str) -> int:
    """The exit code. ``named``: of each client its name and its interpreter."""
    asked = [each.partition("=")[::2] for each in named]
    failed = []
    with tempfile.TemporaryDirectory() as temporary:
        work, folder = Path(temporary), smollm2_folder()
        flags = {"served-model-name": MODEL, "local-prefill-below-tokens": "0"}
        with running_cluster(work / "cluster", str(folder), router_flags=flags) as cluster:
            asyncio.run(cluster.wait_ready())
            url = f"http://{cluster.router.http_address}/v1"
            server = Server(cluster.router.address, url, folder, work)
            for name, python in asked:
                try:
                    print(f"{name}: {CLIENTS[name](server, python)}", flush=True)  # noqa: T201
                except (AssertionError, subprocess.SubprocessError) as error:
                    print(f"{name}: FAILED: {error!r}", flush=True)  # noqa: T201
                    failed.append(name)
            asyncio.run(cluster.wait_baseline(within_s=10))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
