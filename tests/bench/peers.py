"""Diptych beside other servers on this machine: the same prompts, in turn, in one run.

    .venv/bin/python -m tests.bench.peers --model demo \\
        --diptych one=127.0.0.1:4000 --openai vllm=http://127.0.0.1:8000/v1

How to start the servers: ``tests/bench/peers.md``. Each round asks every server
the same texts, which no server has seen before; the order of servers changes from
round to round. A text has the same number of tokens everywhere, because it is made
of words that are one token each. What a server says it read and wrote is checked.

Ratios are ours (``--diptych``) over theirs: output tokens/s, or for the long
prompt its tokens/s until the first token. Above 1 we are faster.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import grpc
import httpx

from diptych import model_source, rpc
from diptych.tokenizer import Tokenizer
from diptych.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from tests.bench.handoff import environment
from tests.bench.machine_use import MachineUse
from tests.golden import models

# Asks for exactly max_tokens tokens; unknown fields are ignored by vLLM and llama.cpp.
_EXACT: dict[str, Any] = {"ignore_eos": True}
_TIMEOUT_S = 280.0


class Scenario(NamedTuple):
    """Requests that are sent at the same time."""

    name: str
    num_streams: int
    num_prompt_tokens: int
    num_output_tokens: int


class Reply(NamedTuple):
    """One answer. Times in s on the monotonic clock."""

    sent_s: float
    first_s: float  # first token
    last_s: float
    num_prompt_tokens: int  # as the server says
    num_output_tokens: int


class Target(Protocol):
    """A server under test."""

    @property
    def name(self) -> str: ...
    @property
    def ours(self) -> bool: ...
    async def ask(self, text: str, num_output_tokens: int) -> Reply: ...


class OpenAITarget:
    """Any server of the OpenAI completions API, streaming."""

    ours = False

    def __init__(
        self, name: str, client: httpx.AsyncClient, model_id: str, extra: dict[str, Any]
    ) -> None:
        """client: its base_url ends with the API's version, such as /v1."""
        self.name = name
        self._client = client
        self._body = {
            "model": model_id,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **extra,
        }

    async def ask(self, text: str, num_output_tokens: int) -> Reply:
        """Raises ValueError if the server does not say how many tokens there were."""
        body = {**self._body, "prompt": text, "max_tokens": num_output_tokens}
        sent_s, times = time.monotonic(), []
        usage: dict[str, int] = {}
        async with self._client.stream("POST", "/completions", json=body) as reply:
            if reply.status_code != httpx.codes.OK:
                raise ValueError(f"{self.name}: {reply.status_code}: {await reply.aread()!r}")
            async for line in reply.aiter_lines():
                event = _event(line)
                if event.get("choices"):
                    times.append(time.monotonic())
                usage = event.get("usage") or usage
        if not usage or not times:
            raise ValueError(f"{self.name}: an answer without usage or tokens")
        return Reply(
            sent_s, times[0], times[-1], usage["prompt_tokens"], usage["completion_tokens"]
        )


def _event(line: str) -> dict[str, Any]:
    """The content of a line of an event stream; empty if it has none."""
    kind, _, content = line.partition(":")
    if kind != "data" or content.strip() in ("", "[DONE]"):
        return {}
    event: dict[str, Any] = json.loads(content)
    return event


class DiptychTarget:
    """A router, over gRPC."""

    ours = True

    def __init__(self, name: str, channel: grpc.aio.Channel) -> None:
        self.name = name
        self._stub = inference_pb2_grpc.InferenceStub(channel)

    async def ask(self, text: str, num_output_tokens: int) -> Reply:
        request = inference_pb2.GenerateRequest(
            text=text,
            sampling=common_pb2.SamplingParams(
                temperature=0.0, max_tokens=num_output_tokens, ignore_eos=True
            ),
        )
        sent_s, times = time.monotonic(), []
        last = inference_pb2.GenerateResponse()
        async for response in self._stub.Generate(request, timeout=_TIMEOUT_S):
            last = response
            if response.token_ids:
                times.append(time.monotonic())
        usage = last.usage
        return Reply(sent_s, times[0], times[-1], usage.num_prompt_tokens, usage.num_output_tokens)


class Prompts:
    """Texts of an exact number of tokens, each new."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer, self._rng = tokenizer, random.Random(seed)
        pieces = map(tokenizer.text.piece, range(min(tokenizer.vocab_size, 20_000)))
        texts = {p if isinstance(p, str) else p.decode(errors="replace") for p in pieces}
        words = sorted(text for text in texts if text[:1] == " " and text[1:].isalpha())
        self._words = [
            word
            for word in words
            if word.isascii() and len(tokenizer.encode(word, add_special=False)) == 1
        ]

    def text(self, num_tokens: int) -> str:
        """Random words; the model's own first token counts."""
        words = [self._rng.choice(self._words) for _ in range(num_tokens)]
        while (excess := len(self._tokenizer.encode("".join(words))) - num_tokens) > 0:
            del words[-excess:]
        return "".join(words)


async def measure(target: Target, scenario: Scenario, texts: Sequence[str]) -> dict[str, Any]:
    """Ask all texts at once; one row."""
    use = MachineUse()
    async with asyncio.TaskGroup() as tasks:
        asked = [
            tasks.create_task(target.ask(text, scenario.num_output_tokens), name="ask")
            for text in texts
        ]
    replies = [task.result() for task in asked]
    wall_s = max(r.last_s for r in replies) - min(r.sent_s for r in replies)
    num_output = sum(r.num_output_tokens for r in replies)
    ttft_s = statistics.median(r.first_s - r.sent_s for r in replies)
    exact = all(
        reply.num_prompt_tokens == scenario.num_prompt_tokens
        and reply.num_output_tokens == scenario.num_output_tokens
        for reply in replies
    )
    row: dict[str, Any] = {
        "target": target.name,
        "scenario": scenario.name,
        "ttft_s": ttft_s,
        "output_tokens_per_s": num_output / wall_s,
        "prompt_tokens_per_s": replies[0].num_prompt_tokens / ttft_s,
        "num_prompt_tokens": [r.num_prompt_tokens for r in replies],
        "num_output_tokens": [r.num_output_tokens for r in replies],
        "exact": exact,
        "machine": use.since(),
    }
    if scenario.num_output_tokens > 1:
        row["decode_tokens_per_s"] = statistics.median(
            (r.num_output_tokens - 1) / (r.last_s - r.first_s) for r in replies
        )
    return row


async def compare(
    targets: Sequence[Target], scenarios: Sequence[Scenario], prompts: Prompts, num_rounds: int
) -> list[dict[str, Any]]:
    """All rows. Before the first round each server answers one short request, unmeasured."""
    for target in targets:
        await target.ask(prompts.text(32), 8)
    rows = []
    for number in range(num_rounds):
        for scenario in scenarios:
            texts = [prompts.text(scenario.num_prompt_tokens) for _ in range(scenario.num_streams)]
            turn = number % len(targets)
            for target in [*targets[turn:], *targets[:turn]]:
                row = await measure(target, scenario, texts)
                rows.append({"round": number, **row})
                show(line(row))
    return rows


def metric(scenario: Scenario) -> str:
    """What is compared."""
    return "output_tokens_per_s" if scenario.num_output_tokens > 1 else "prompt_tokens_per_s"


def medians(rows: Sequence[dict[str, Any]], name: str, key: str) -> dict[str, float]:
    """Of one figure in one scenario, by target."""
    values: dict[str, list[float]] = {}
    for row in rows:
        if row["scenario"] == name and key in row:
            values.setdefault(row["target"], []).append(row[key])
    return {target: statistics.median(each) for target, each in values.items()}


def ratios(
    rows: Sequence[dict[str, Any]], scenarios: Sequence[Scenario], ours: Sequence[str]
) -> list[dict[str, Any]]:
    """Ours over theirs, medians, for every scenario and pair of servers."""
    result = []
    for scenario in scenarios:
        by_target = medians(rows, scenario.name, metric(scenario))
        theirs = [name for name in by_target if name not in ours]
        for our, their in itertools.product(ours, theirs):
            ratio = by_target[our] / by_target[their]
            result.append({"scenario": scenario.name, "ours": our, "theirs": their, "ratio": ratio})
    return result


def table(
    rows: Sequence[dict[str, Any]], scenarios: Sequence[Scenario], ours: Sequence[str]
) -> str:
    compared = ratios(rows, scenarios, ours)
    lines = []
    for scenario in scenarios:
        key = metric(scenario)
        speeds, ttfts = (medians(rows, scenario.name, each) for each in (key, "ttft_s"))
        decodes = medians(rows, scenario.name, "decode_tokens_per_s")
        lines.append(f"{scenario.name}: {key.replace('_', ' ')}")
        for name, speed in speeds.items():
            pairs = [c for c in compared if (c["scenario"], c["theirs"]) == (scenario.name, name)]
            text = f"  {name:<16}{speed:9.1f}   TTFT {ttfts[name]:6.2f} s"
            if name in decodes:
                text += f"   decode {decodes[name]:6.1f} tokens/s per stream"
            lines.append(text + "".join(f"   {c['ours']} x{c['ratio']:.2f}" for c in pairs))
    inexact = sorted({f"{r['target']} ({r['scenario']})" for r in rows if not r["exact"]})
    if inexact:
        lines.append("token counts differ from what was asked: " + ", ".join(inexact))
    return "\n".join(lines)


def line(row: dict[str, Any]) -> str:
    count = (
        "" if row["exact"] else f", tokens {row['num_prompt_tokens']} {row['num_output_tokens']}"
    )
    return (
        f"{row['scenario']}: {row['target']}: {row['output_tokens_per_s']:.1f} tokens/s, "
        f"TTFT {row['ttft_s']:.2f} s, machine {row['machine']['cores_busy']:.2f} cores{count}"
    )


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def named(text: str) -> tuple[str, str]:
    """NAME=VALUE. Raises argparse.ArgumentTypeError."""
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE (got {text!r})")
    return name, value


async def run(options: argparse.Namespace) -> dict[str, Any]:
    if options.model == "gemma":
        folder = models.golden_folder("gemma3")
    else:
        folder = model_source.resolve(
            options.model, model_source.DEFAULT_CACHE_DIR, lambda stage, ratio: None
        ).folder
    prompts = Prompts(Tokenizer(folder), options.seed)
    scenarios = [
        Scenario(f"{num} at a time", num, options.prompt_tokens, options.output_tokens)
        for num in options.streams
    ]
    if options.long_prompt_tokens:
        scenarios.append(Scenario("long prompt", 1, options.long_prompt_tokens, 1))
    bodies = {name: json.loads(body) for name, body in options.body}
    model_ids = dict(options.model_id)
    async with AsyncExitStack() as stack:
        targets: list[Target] = []
        for name, address in options.diptych:
            targets.append(
                DiptychTarget(name, await stack.enter_async_context(rpc.channel(address)))
            )
        for name, url in options.openai:
            client = httpx.AsyncClient(
                base_url=url, timeout=_TIMEOUT_S, limits=httpx.Limits(max_connections=None)
            )
            await stack.enter_async_context(client)
            model_id = model_ids.get(name, str(folder))
            targets.append(OpenAITarget(name, client, model_id, bodies.get(name, _EXACT)))
        rows = await compare(targets, scenarios, prompts, options.rounds)
    ours = [name for name, _ in options.diptych]
    print(table(rows, scenarios, ours))  # noqa: T201
    return {
        "environment": environment(),
        "model": str(folder.name),
        "load_average": os.getloadavg(),
        "ratios": ratios(rows, scenarios, ours),
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="demo", help="demo, gemma or a folder: whose tokens are counted")
    add("--diptych", type=named, action="append", default=[], help="NAME=HOST:PORT of a router")
    add("--openai", type=named, action="append", default=[], help="NAME=URL, which ends in /v1")
    add("--model-id", type=named, action="append", default=[], help="NAME=ID; default: the folder")
    add("--body", type=named, action="append", default=[], help=f"NAME=JSON; default: {_EXACT}")
    add("--streams", type=int, nargs="*", default=[1, 8, 16], help="requests at a time")
    add("--prompt-tokens", type=int, default=512)
    add("--output-tokens", type=int, default=128)
    add("--long-prompt-tokens", type=int, default=2048, help="0: none")
    add("--rounds", type=int, default=3)
    add("--seed", type=int, default=os.getpid(), help="of the texts; the same are cached")
    add("--out", type=Path, default=Path("bench-peers.json"))
    options = parser.parse_args()
    result = asyncio.run(run(options))
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
