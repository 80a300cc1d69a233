"""``python -m tests.integration.clients.suite NAME=PATH...``: clients that others wrote.

Each runs by the interpreter that it is installed for, or for Node beside its modules, against one
prefill and one decode worker with SmolLM2, whose chat template is given a place for tools.
``make clients`` and ``make clients-long`` say which. Ends with 1 where one of them is not content.
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from diptych.client import DiptychClient, SamplingOptions
from tests.cluster import Cluster, running_cluster
from tests.golden.models import smollm2_folder
from tests.integration.clients.capitals import TASK, write_task
from tests.waiting import until

HERE: Final = Path(__file__).parent
MODEL: Final = "demo"
MOST_S: Final = 1800
ENDS_S: Final = 60.0
LEFT: Final = 'diptych_requests_total{outcome="cancelled"}'
TOLD_TOOLS: Final = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
COMPLIES: Final = {
    "openai-chat": (
        "chat-basic-response",
        "chat-system-prompt",
        "chat-multi-turn",
        "chat-tool-calling",
        "chat-streaming-response",
        "chat-streaming-usage",
        "chat-error-handling",
    ),
    "open-responses": (
        "basic-response",
        "system-prompt",
        "multi-turn",
        "tool-calling",
        "streaming-response",
        "streaming-usage",
        "assistant-phase",
        "response-output-phase-schema",
        "compact-response",
        "compact-missing-model",
        "error-handling",
    ),
}
CLOSE: Final = 1e-3  # log probabilities
NOTHING_FETCHED: Final = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
SAMPLING: Final = SamplingOptions(temperature=0, max_tokens=12, ignore_eos=True)


class Skipped(Exception):  # noqa: N818 - no error
    """A client cannot be here; says why."""


class Server(NamedTuple):
    """A cluster, and where its clients may write."""

    cluster: Cluster
    model: str
    """As it is served."""
    folder: Path
    """The model's."""
    work: Path

    @property
    def url(self) -> str:
        """Of the HTTP API; ends with /v1."""
        return f"http://{self.cluster.router.http_address}/v1"

    def ask_by(self, python: str, script: str, *args: str) -> str:
        """What a script of this folder prints, which sees none of the others.

        Raises CalledProcessError.
        """
        return self.ask([str(Path(python).absolute()), "-P", str(HERE / script), *args])

    def ask(self, command: Sequence[str], **variables: str) -> str:
        """What a command prints that ends well. Raises CalledProcessError."""
        fetched = {**NOTHING_FETCHED, "HF_HOME": str(self.work / "hub"), **variables}
        done = subprocess.run(
            command,
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
    server.ask_by(python, "by_openai.py", server.url, server.model)
    return "models, chats, a form, completions, responses, vectors, a refusal"


def tritonclient(server: Server, python: str) -> str:
    """It is answered what our own client is."""
    address = server.cluster.router.address
    told = json.loads(server.ask_by(python, "by_triton.py", address, server.model))
    (text,), (echoed,) = (told["answers"][name]["text_output"] for name in ("alone", "echoed"))
    expected = asyncio.run(_ask(address, echoed.removesuffix(text)))
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
    server.ask_by(python, "by_litellm.py", server.url, server.model)
    return "whole, streamed, vectors, a refusal"


def langchain_openai(server: Server, python: str) -> str:
    """Whole, streamed, a schema, vectors."""
    server.ask_by(python, "by_langchain.py", server.url, server.model)
    return "whole, streamed, a schema, vectors"


def lm_eval(server: Server, python: str) -> str:
    """The same scores as transformers in one process."""
    write_task(server.work)
    remote = f"model={server.model},base_url={server.url}/completions,tokenizer={server.folder}"
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


def openai_node(server: Server, modules: str) -> str:
    """The same in Node, and calls; a stream that it leaves ends in the cluster."""
    _ask_by_node(server, modules, "by_openai.mjs")
    return "models, chats, a form, calls, responses, vectors, refusals, a stream left"


def ai_sdk(server: Server, modules: str) -> str:
    """As a program that calls tools uses it; a stream that it leaves ends in the cluster."""
    _ask_by_node(server, modules, "by_ai_sdk.mjs")
    return "texts, a form, calls, vectors, a refusal, a stream left"


def _ask_by_node(server: Server, modules: str, script: str) -> None:
    """Raises Skipped where there is no Node, or nothing was installed for it."""
    node, installed = shutil.which("node"), Path(modules, "node_modules").absolute()
    if node is None or not installed.is_dir():
        raise Skipped("no node, or no npm")
    router = server.cluster.router
    num_left = router.metric(LEFT)
    beside = server.work / script  # where it looks for its modules
    shutil.copy(HERE / script, beside)
    link = server.work / "node_modules"
    link.unlink(missing_ok=True)
    link.symlink_to(installed)
    server.ask([node, str(beside), server.url, server.model])
    asyncio.run(until(lambda: router.metric(LEFT) == num_left + 1, ENDS_S, "the stream has ended"))
    asyncio.run(server.cluster.wait_baseline(within_s=ENDS_S))


def llm_comply(server: Server, python: str) -> str:
    """All but images, which the models here do not see, and reasoning models' own."""
    told = []
    for form, passed in COMPLIES.items():
        command = [str(Path(python).absolute()), "-m", "llm_comply.cli", "--json"]
        command += ["--base-url", server.url, "--api-key", "none", "--model", server.model]
        try:
            printed = server.ask([*command, "--format", form, "--filter", ",".join(passed)])
        except subprocess.CalledProcessError as failed:
            printed = failed.stdout
        results = json.loads(printed)["results"]
        wrong = [each for each in results if each["status"] != "passed"]
        assert not wrong, wrong
        assert [each["id"] for each in results] == list(passed)
        told.append(f"{len(passed)} of {form}")
    return ", ".join(told)


def schemathesis(server: Server, python: str, num_each: int = 200) -> str:
    """No body that it draws is a server's error, and every answer fits OpenAI's description."""
    printed = server.ask_by(python, "by_schemathesis.py", server.url, server.model, str(num_each))
    statuses: dict[str, dict[str, int]] = json.loads(printed)
    for operation, seen in statuses.items():
        assert seen.get("200"), f"{operation} never answered: {seen}"
    return "; ".join(f"{operation} {seen}" for operation, seen in statuses.items())


def aiperf(server: Server, python: str) -> str:
    """It counts the requests and tokens that it asked for, and no error."""
    num_requests, num_tokens = 24, 16
    made = server.work / "aiperf"
    command = [str(Path(python).absolute().parent / "aiperf"), "profile", "--ui", "none"]
    command += ["--model", server.model, "--tokenizer", str(server.folder)]
    command += ["--url", server.url.removesuffix("/v1"), "--endpoint-type", "chat", "--streaming"]
    command += ["--request-count", str(num_requests), "--concurrency", "3"]
    command += ["--isl", "60", "--osl", str(num_tokens), "--extra-inputs", "ignore_eos:true"]
    # Its tokenizer is in a folder: none is looked for, but offline it would not look there either.
    server.ask([*command, "--artifact-dir", str(made)], HF_HUB_OFFLINE="")
    (path,) = made.rglob("profile_export_aiperf.json")
    told = json.loads(path.read_text())
    counts = {name: told[name]["avg"] for name in ("request_count", "output_sequence_length")}
    assert counts == {"request_count": num_requests, "output_sequence_length": num_tokens}, counts
    assert not told.get("error_summary"), told["error_summary"]
    ttft, itl = (told[name]["avg"] for name in ("time_to_first_token", "inter_token_latency"))
    return f"{num_requests} requests of {num_tokens} tokens: TTFT {ttft:.0f} ms, ITL {itl:.0f} ms"


CLIENTS: Final[dict[str, Callable[[Server, str], str]]] = {
    "openai": openai,
    "tritonclient": tritonclient,
    "openai-node": openai_node,
    "ai-sdk": ai_sdk,
    "llm-comply": llm_comply,
    "schemathesis": schemathesis,
    "litellm": litellm,
    "langchain-openai": langchain_openai,
    "lm-eval": lm_eval,
    "aiperf": aiperf,
}


def with_tools(model: Path, folder: Path) -> Path:
    """The same model, whose chat template tells of tools. Returns ``folder``."""
    folder.mkdir()
    for each in model.iterdir():
        (folder / each.name).symlink_to(each)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.unlink()
    template = settings["chat_template"].replace("message['content']", "(message['content'] or '')")
    settings["chat_template"] = TOLD_TOOLS + template
    path.write_text(json.dumps(settings))
    return folder


def main(*named: str) -> int:
    """The exit code. ``named``: of each client its name and where it is."""
    asked = [each.partition("=")[::2] for each in named]
    failed = []
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        folder = with_tools(smollm2_folder(), work / "model")
        flags = {"served-model-name": MODEL, "local-prefill-below-tokens": "0"}
        flags |= {"answer-form": "hermes"}
        with running_cluster(work / "cluster", str(folder), router_flags=flags) as cluster:
            asyncio.run(cluster.wait_ready())
            server = Server(cluster, MODEL, folder, work)
            for name, python in asked:
                try:
                    print(f"{name}: {CLIENTS[name](server, python)}", flush=True)  # noqa: T201
                except Skipped as reason:
                    print(f"{name}: skipped: {reason}", flush=True)  # noqa: T201
                except (AssertionError, subprocess.SubprocessError) as error:
                    print(f"{name}: FAILED: {error!r}", flush=True)  # noqa: T201
                    failed.append(name)
            asyncio.run(cluster.wait_baseline(within_s=10))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
