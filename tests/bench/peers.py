"""Diptych beside other servers on this machine: the same prompts, in turn, in one run.

    .venv/bin/python -m tests.bench.peers --model demo \\
        --diptych one=127.0.0.1:4000 --start one=".venv/bin/diptych up --port 4000 ..." \\
        --openai vllm=http://127.0.0.1:8000/v1 --start vllm="vllm serve ..."

How the servers are started: ``tests/bench/peers.md``. In each round every server has its
turn, in the opposite order every other round: it is started (unless it has no
``--start``: then it runs already), warmed up, measured and ended. With ``--keep`` each is started
once, and between its turns all of its processes are stopped (SIGSTOP). Each round asks every
server the same texts, which no server has seen before. A text has the same number of
tokens everywhere, because it is made of words that are one token each. What a server
says it read and wrote is checked. A server that fails is left out from then on, and named.
The JSON names the processor and every version, so that it can be checked: commit it, in
``docs/bench``, where a page quotes it.

Ratios are ours (``--diptych``) over theirs, of the medians of all rounds: output
tokens/s, or for the long prompt its tokens/s until the first token. Above 1 we are faster.
"""

import argparse
import asyncio
import json
import os
import random
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from diptych.models import source as model_source
from diptych.text.tokenizer import Tokenizer
from tests.bench.environment import environment, without_matrix_unit
from tests.bench.machine_use import MachineUse
from tests.bench.peer_ratios import Scenario, line, ratios, table
from tests.bench.peer_servers import EXACT, Running, Server, ServerError, Target
from tests.golden import models

_WARM_UP_TOKENS = 8
_LEAST_S = 1e-6
_SHORT_PROMPT_TOKENS = 32


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
        "machine": use.since()._asdict(),
    }
    if scenario.num_output_tokens > 1:
        row["decode_tokens_per_s"] = statistics.median(
            (r.num_output_tokens - 1) / max(r.last_s - r.first_s, _LEAST_S) for r in replies
        )
    return row


class Comparison:
    """Turns of all servers, in rounds. What was measured stays there if a round is cut short."""

    def __init__(
        self,
        servers: Sequence[Server],
        scenarios: Sequence[Scenario],
        prompts: Prompts,
        *,
        keep: bool = False,
    ) -> None:
        """``keep``: servers stand still between their turns, and are not started anew."""
        self.rows: list[dict[str, Any]] = []
        self.failures: dict[str, str] = {}  # by server
        self._servers, self._scenarios, self._prompts = servers, scenarios, prompts
        self._keeps = keep
        self._kept: dict[str, Running] = {}
        self._until_the_end = AsyncExitStack()

    async def run(self, num_rounds: int) -> None:
        """All rounds; says how long they take."""
        async with self._until_the_end:
            for number in range(num_rounds):
                began_s = time.monotonic()
                await self._round(number)
                round_s = time.monotonic() - began_s
                show(f"round {number + 1} of {num_rounds}: {round_s:.0f} s")

    async def _round(self, number: int) -> None:
        texts = {
            each.name: [self._prompts.text(each.num_prompt_tokens) for _ in range(each.num_streams)]
            for each in self._scenarios
        }
        for server in self._servers if number % 2 == 0 else reversed(self._servers):
            if server.name in self.failures:
                continue
            began_s = time.monotonic()
            try:
                await self._turn(server, number, texts)
            except* ServerError as errors:
                self.failures[server.name] = str(errors.exceptions[0])
                show(f"{server.name} is left out: {self.failures[server.name]}")
            show(f"{server.name}: a turn of {time.monotonic() - began_s:.0f} s")

    async def _turn(self, server: Server, number: int, texts: dict[str, list[str]]) -> None:
        """Raises ServerError, alone or in groups."""
        async with self._asked(server) as target:
            await self.warm_up(target)
            for scenario in self._scenarios:
                row = await measure(target, scenario, texts[scenario.name])
                self.rows.append({"round": number, **row})
                show(line(row))

    @asynccontextmanager
    async def _asked(self, server: Server) -> AsyncIterator[Target]:
        if not self._keeps:
            async with server.running() as running:
                yield running.target
            return
        kept = self._kept.get(server.name)
        if kept is None:
            kept = await self._until_the_end.enter_async_context(server.running())
            self._kept[server.name] = kept
        else:
            await kept.resume()
        try:
            yield kept.target
        finally:
            kept.pause()

    async def warm_up(self, target: Target) -> None:
        """A prompt of each length that is measured, and short ones, as many as ever at a time."""
        num_streams = max(each.num_streams for each in self._scenarios)
        for length in sorted({each.num_prompt_tokens for each in self._scenarios}):
            await target.ask(self._prompts.text(length), _WARM_UP_TOKENS)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(num_streams):
                text = self._prompts.text(_SHORT_PROMPT_TOKENS)
                tasks.create_task(target.ask(text, _WARM_UP_TOKENS), name="warm up")


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def named(text: str) -> tuple[str, str]:
    """NAME=VALUE. Raises argparse.ArgumentTypeError."""
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE (got {text!r})")
    return name, value


def counts(text: str) -> list[int]:
    """Numbers between commas; none of an empty text."""
    return [int(number) for number in text.split(",") if text]


def servers_of(options: argparse.Namespace, folder: Path) -> list[Server]:
    commands, model_ids = dict(options.start), dict(options.model_id)
    bodies = {name: json.loads(body) for name, body in options.body}
    return [
        Server(
            name=name,
            ours=ours,
            address=address,
            command=commands.get(name),
            log=options.out.with_suffix(f".{name}.log"),
            model_id=model_ids.get(name, str(folder)),
            extra=bodies.get(name, EXACT),
            environment=without_matrix_unit() if options.without_matrix_unit else {},
        )
        for ours, pairs in ((True, options.diptych), (False, options.openai))
        for name, address in pairs
    ]


def form_of_weights(server: Server) -> str:
    """How a server of ours kept the model's weights, as its log says."""
    if not server.command or not server.log.is_file():
        return "not known: it was not started here"
    if "weights are kept compact" in server.log.read_text(errors="replace"):
        return "float32, bit for bit, kept compact"
    return "as its command says, as loaded"


def output_of(command: str) -> str:
    """What it prints, or how it failed."""
    try:
        done = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return repr(error)
    return done.stdout.strip() or done.stderr.strip()


def folder_of(model: str) -> Path:
    if model == "gemma":
        return models.golden_folder("gemma3")
    return model_source.resolve(
        model, model_source.DEFAULT_CACHE_DIR, lambda stage, ratio: None
    ).folder


async def run(options: argparse.Namespace) -> int:
    """Compare, write and print; 1 if a server failed. A termination signal cuts it short."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    folder = folder_of(options.model)
    scenarios = [
        Scenario(f"{num} at a time", num, options.prompt_tokens, options.output_tokens)
        for num in options.streams
    ]
    if options.long_prompt_tokens:
        scenarios.append(Scenario("long prompt", 1, options.long_prompt_tokens, 1))
    servers = servers_of(options, folder)
    prompts = Prompts(Tokenizer(folder), options.seed)
    comparison = Comparison(servers, scenarios, prompts, keep=options.keep)
    try:
        await comparison.run(options.rounds)
    finally:
        ours = [server.name for server in servers if server.ours]
        result = {
            "environment": environment(without_unit=options.without_matrix_unit),
            "versions": {name: output_of(command) for name, command in options.version},
            "num_rounds": options.rounds,
            "kept": options.keep,
            "model": str(folder.name),
            "servers": {s.name: s.command for s in servers},
            "weights": {s.name: form_of_weights(s) for s in servers if s.ours},
            "failures": comparison.failures,
            "ratios": ratios(comparison.rows, scenarios, ours),
            "rows": comparison.rows,
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n")
        print(table(comparison.rows, scenarios, ours))  # noqa: T201
        for name, form in result["weights"].items():
            print(f"weights of {name}: {form}")  # noqa: T201
    return 1 if comparison.failures else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="demo", help="demo, gemma or a folder: whose tokens are counted")
    add("--diptych", type=named, action="append", default=[], help="NAME=HOST:PORT of a router")
    add("--openai", type=named, action="append", default=[], help="NAME=URL, which ends in /v1")
    add("--start", type=named, action="append", default=[], help="NAME=COMMAND of its turn")
    add("--model-id", type=named, action="append", default=[], help="NAME=ID; default: the folder")
    add("--body", type=named, action="append", default=[], help=f"NAME=JSON; default: {EXACT}")
    add("--streams", type=counts, default=[1, 8, 16], help="requests at a time: 1,8,16")
    add("--prompt-tokens", type=int, default=512)
    add("--output-tokens", type=int, default=128)
    add("--long-prompt-tokens", type=int, default=2048, help="0: none")
    add("--version", type=named, action="append", default=[], help="NAME=COMMAND that says it")
    add("--rounds", type=int, default=5, help="fewer are not enough to be quoted")
    add("--keep", action="store_true", help="start each server once; it waits stopped")
    add("--without-matrix-unit", action="store_true", help="for all that are started here")
    add("--seed", type=int, default=os.getpid(), help="of the texts; the same are cached")
    add("--out", type=Path, default=Path("bench-peers.json"), help="logs of servers go beside it")
    try:
        return asyncio.run(run(parser.parse_args()))
    except asyncio.CancelledError:
        show("cut short by a signal")
        return 128 + signal.SIGTERM


if __name__ == "__main__":
    sys.exit(main())
