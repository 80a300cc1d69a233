"""Requests whose objectives nobody can meet: how long each takes to be refused.

    python -m tests.bench.unreachable [--requests 150] [--streams 8] [--json OUT]

A router and two workers of both roles that know what their steps take, each with a core to itself.
Each such request wants its first token within 5 ms. In turn they come one after the other while
nothing else is to be done, and while the workers decode and compute prompts for so many streams.
Now and then one is served, so that the router learns whether its forecast is right: these do not
count.
"""

import argparse
import asyncio
import json
import random
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import grpc
import uvloop

from diptych.errors import DeadlineUnreachableError
from diptych.rpc.channel import open_channel
from tests.bench.environment import environment
from tests.bench.goodput import warm_up
from tests.bench.slo import Lengths
from tests.bench.workload import Workload
from tests.call import generate, token_request
from tests.cluster import Cluster, running_cluster

MAX_REFUSAL_MS: Final = 20.0
_TTFT_MS: Final = 5.0
_NUM_TURNS: Final = 3
_PAUSE_S: Final = 0.1
_PROMPT_TOKENS: Final = 256
_STREAMED: Final = Lengths(prompt=128, output=64)
_VOCAB: Final = 49_000  # token ids below this


class Taken(NamedTuple):
    """How long refusals took, of all turns."""

    num_refused: int
    p50_ms: float
    p99_ms: float
    most_ms: float

    @classmethod
    def of(cls, taken_s: Sequence[float]) -> "Taken":
        in_ms = sorted(round(1e3 * each, 2) for each in taken_s)
        percentiles = statistics.quantiles(in_ms, n=100)
        return cls(len(in_ms), round(percentiles[49], 2), round(percentiles[98], 2), in_ms[-1])


class Outcome(NamedTuple):
    """With idle workers, and with busy ones."""

    idle: Taken
    busy: Taken


async def refused_s(channel: grpc.aio.Channel, prompt: list[int]) -> float | None:
    """How long it takes to hear of it; None: it is served."""
    request = token_request(prompt, max_tokens=10, salt=secrets.token_hex(8))
    request.ttft_ms = _TTFT_MS
    begun = time.monotonic()
    answer = await generate(channel, request)
    taken_s = time.monotonic() - begun
    if answer.error is None:
        return None
    if not isinstance(answer.error, DeadlineUnreachableError):
        raise answer.error
    return taken_s


async def stream(channel: grpc.aio.Channel, work: Workload, rng: random.Random) -> None:
    """One answer after the other, until it is cancelled."""
    while True:
        prompt, salt = work.prompt(_STREAMED.prompt, rng), secrets.token_hex(8)
        request = token_request(prompt, max_tokens=_STREAMED.output, salt=salt)
        answer = await generate(channel, request)
        assert answer.error is None, answer.error


async def turn(channel: grpc.aio.Channel, work: Workload, num_requests: int) -> list[float]:
    rng, found = random.Random(7), []
    for _ in range(num_requests):
        found.append(await refused_s(channel, work.prompt(_PROMPT_TOKENS, rng)))
        await asyncio.sleep(_PAUSE_S)
    return [each for each in found if each is not None]


async def measure(cluster: Cluster, num_requests: int, num_streams: int) -> Outcome:
    """Of so many requests in each of both states."""
    work, rng = Workload([_STREAMED], _VOCAB), random.Random(5)
    await cluster.wait_ready(2)
    await warm_up(cluster, work)
    idle, busy = list[float](), list[float]()
    async with open_channel(cluster.router.address) as channel:
        for _ in range(_NUM_TURNS):
            idle += await turn(channel, work, num_requests // _NUM_TURNS)
            async with asyncio.TaskGroup() as tasks:
                streams = [
                    tasks.create_task(stream(channel, work, rng)) for _ in range(num_streams)
                ]
                await asyncio.sleep(1.0)  # until all of them decode
                busy += await turn(channel, work, num_requests // _NUM_TURNS)
                for each in streams:
                    each.cancel()
            await cluster.wait_baseline(within_s=30.0)
    return Outcome(Taken.of(idle), Taken.of(busy))


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--json", type=Path, help="Write the result there.")
    given = parser.parse_args(args)
    with (
        tempfile.TemporaryDirectory() as folder,
        running_cluster(
            Path(folder),
            given.model,
            num_prefill=0,
            num_decode=2,
            worker_flags={"kv-cache-memory": "256MiB", "num-threads": "1"},
            per_decode_flags=[{"cpus": "0"}, {"cpus": "1"}],
            router_flags={"placement": "predicted"},
            decode_module="soft_worker",
        ) as cluster,
    ):
        outcome = uvloop.run(measure(cluster, given.requests, given.streams))
    told = {state: taken._asdict() for state, taken in outcome._asdict().items()}
    text = json.dumps({"environment": environment(), **told}, indent=1)
    if given.json is not None:
        given.json.write_text(text + "\n")
    print(text)  # noqa: T201
    return 0 if max(outcome.idle.p99_ms, outcome.busy.p99_ms) <= MAX_REFUSAL_MS else 1


if __name__ == "__main__":
    sys.exit(main())
