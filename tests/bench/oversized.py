"""Requests as large as a message may be, beside ordinary ones: what the router suffers.

    .venv/bin/python -m tests.bench.oversized [--requests 1000]

One router, one prefill and one decode worker of a tiny model. So many requests of 16 MiB of
token ids come, a few at a time, and all must be refused; clients beside them ask what can be
served, and each must be answered as if it were alone. Reported: how the router's memory grew,
how late its event loop was (p99, by its own histogram's buckets), and what the neighbours got.
The limits: p99 of the lag < 50 ms, growth <= 64 MiB. Beyond them the exit code is 1.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import grpc

from diptych.rpc.channel import MAX_MESSAGE_BYTES, open_channel
from diptych.v1 import inference_pb2
from tests.bench.environment import environment
from tests.call import Answer, generate, token_request
from tests.cluster import Cluster, running_cluster
from tests.prompts import prompt
from tests.tiny_model import write_tiny_model

AT_ONCE = 4
NUM_NEIGHBOURS = 4
NEIGHBOUR_TOKENS = 32
MAX_LAG_S = 0.05
MAX_GROWTH_BYTES = 64 * 2**20  # four messages that are under way
_REFUSALS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
_LAG = 'diptych_event_loop_lag_seconds_bucket{le="'


class Outcome(NamedTuple):
    """Of one run."""

    num_refused: int
    num_neighbours: int  # answers beside them
    growth_bytes: int  # of the router's memory
    p99_lag_s: float  # no more than this

    @property
    def is_within_limits(self) -> bool:
        return self.p99_lag_s <= MAX_LAG_S and self.growth_bytes <= MAX_GROWTH_BYTES


def oversized() -> bytes:
    """A GenerateRequest whose token ids fill a message, already serialized."""
    small = inference_pb2.GenerateRequest(tokens=inference_pb2.TokenPrompt(ids=[5]))
    num_ids = MAX_MESSAGE_BYTES - 64
    # As protobuf writes it: tokens { ids: packed }, each id below 128 a byte.
    ids_tag, tokens_tag = small.tokens.SerializeToString()[:1], small.SerializeToString()[:1]
    ids = ids_tag + _varint(num_ids) + b"\x05" * num_ids
    return tokens_tag + _varint(len(ids)) + ids


def _varint(number: int) -> bytes:
    parts = []
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts, number])


async def measure(cluster: Cluster, num_requests: int) -> Outcome:
    """Raises AssertionError if a large request is served, or a neighbour is disturbed."""
    message, stop = oversized(), asyncio.Event()
    async with open_channel(cluster.router.address) as channel:
        want = [await _ask(channel, number) for number in range(NUM_NEIGHBOURS)]
        await _send(channel, message, AT_ONCE)  # what is kept for messages is there
        rss, lag = cluster.router.rss_bytes(), cluster.router.metrics()
        async with asyncio.TaskGroup() as tasks:
            beside = [
                tasks.create_task(_neighbour(channel, number, want[number], stop))
                for number in range(NUM_NEIGHBOURS)
            ]
            num_refused = await _send(channel, message, num_requests)
            stop.set()
        growth = cluster.router.rss_bytes() - rss
        p99_s = p99_lag_s(lag, cluster.router.metrics())
    return Outcome(num_refused, sum(task.result() for task in beside), growth, p99_s)


async def _send(channel: grpc.aio.Channel, message: bytes, num: int) -> int:
    """So many, a few at a time; how many were refused."""
    call = channel.unary_stream(
        "/diptych.v1.Inference/Generate",
        request_serializer=None,
        response_deserializer=inference_pb2.GenerateResponse.FromString,
    )
    slots, num_refused = asyncio.Semaphore(AT_ONCE), 0

    async def one() -> None:
        nonlocal num_refused
        async with slots:
            try:
                async for _ in call(message, timeout=120):
                    raise AssertionError("it is served")
            except grpc.aio.AioRpcError as error:
                num_refused += error.code() in _REFUSALS

    async with asyncio.TaskGroup() as tasks:
        for _ in range(num):
            tasks.create_task(one())
    return num_refused


async def _ask(channel: grpc.aio.Channel, number: int, salt: str = "") -> Answer:
    request = token_request(prompt(40, seed=number), max_tokens=NEIGHBOUR_TOKENS, salt=salt)
    answer = await generate(channel, request)
    assert answer.error is None, answer.error
    return answer


async def _neighbour(
    channel: grpc.aio.Channel, number: int, want: Answer, stop: asyncio.Event
) -> int:
    """Ask the same again and again; how often."""
    num_asked = 0
    while not stop.is_set() or not num_asked:
        num_asked += 1
        answer = await _ask(channel, number, salt=str(num_asked))
        assert answer.token_ids == want.token_ids
    return num_asked


def p99_lag_s(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """The bound of the bucket that 99 % of the timers since then fell into, s."""
    grown = sorted(
        (float(key.removeprefix(_LAG).rstrip('"}')), value - before[key])
        for key, value in after.items()
        if key.startswith(_LAG)
    )
    num_timers = grown[-1][1]
    return next(bound for bound, num in grown if num >= 0.99 * num_timers)


def run(work: Path, num_requests: int) -> Outcome:
    """In a cluster of its own."""
    model = write_tiny_model(work / "tiny")
    flags = {"num-blocks": "128", "max-model-len": "256"}
    with running_cluster(
        work, str(model), worker_flags=flags, router_flags={"local-prefill-below-tokens": "0"}
    ) as cluster:

        async def measured() -> Outcome:
            await cluster.wait_ready()
            outcome = await measure(cluster, num_requests)
            await cluster.wait_baseline(within_s=5)
            return outcome

        return asyncio.run(measured())


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--requests", type=int, default=1000)
    options = parser.parse_args(args)
    with tempfile.TemporaryDirectory() as work:
        outcome = run(Path(work), options.requests)
    result = {"environment": environment(), **outcome._asdict()}
    print(json.dumps(result, indent=1))  # noqa: T201
    return 0 if outcome.is_within_limits else 1


if __name__ == "__main__":
    sys.exit(main())
