"""Requests with constraints that nothing can be held to, beside readers of other answers.

    python -m tests.bench.bad_schemas [--requests 300] [--json OUT]

A router in a process of its own, with a worker that only pretends, streams to a few readers, over
gRPC and as server-sent events. In turn nobody else comes, and one bad constraint after the
other, no two alike: how long each took to be refused, and the readers' gaps between tokens.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import grpc
import uvloop

from diptych.rpc.channel import open_channel
from diptych.v1 import inference_pb2, inference_pb2_grpc
from tests.bench.environment import environment
from tests.bench.router_tokens import Router, running_router
from tests.bench.slow_readers import Gaps, Good
from tests.bench.token_readers import PROMPT
from tests.call import token_request

MAX_REFUSAL_MS: Final = 50.0
_NUM_TURNS: Final = 3
_PAUSE_S: Final = 0.02


class Outcome(NamedTuple):
    """Of all turns."""

    num_refused: int
    p50_ms: float
    p99_ms: float
    without: list[Gaps]
    beside: list[Gaps]


def bad(number: int) -> inference_pb2.Constraint:
    """Another one for each number."""
    match number % 3:
        case 0:
            schema = {"type": "object", "properties": {f"k{number}": {"type": "banana"}}}
            return inference_pb2.Constraint(json_schema=json.dumps(schema))
        case 1:
            return inference_pb2.Constraint(regex=f"(a{number}")
        case _:
            return inference_pb2.Constraint(json_schema=json.dumps({"$ref": f"#/$defs/n{number}"}))


async def refused_s(channel: grpc.aio.Channel, number: int) -> float:
    """How long it takes to hear that it is bad. Raises AssertionError: it is not refused."""
    request = token_request(PROMPT, max_tokens=10)
    request.sampling.constraint.CopyFrom(bad(number))
    begun = time.monotonic()
    try:
        async for _ in inference_pb2_grpc.InferenceStub(channel).Generate(request):
            raise AssertionError("it is served")
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
            raise
    return time.monotonic() - begun


async def measure(router: Router, num_requests: int) -> Outcome:
    """With and without bad ones, in turn; the first of all begins the process that checks."""
    good, taken_s = Good(), list[float]()
    without, beside = [], []
    async with open_channel(router.address) as channel, asyncio.TaskGroup() as tasks:
        reading = await good.begin(router, tasks)
        await refused_s(channel, 3 * num_requests)
        for turn in range(_NUM_TURNS):
            good.forget()
            begun = time.monotonic()
            for number in range(turn, num_requests, _NUM_TURNS):
                taken_s.append(await refused_s(channel, number))
                await asyncio.sleep(_PAUSE_S)
            beside.append(good.take())
            await asyncio.sleep(time.monotonic() - begun)
            without.append(good.take())
        for each in reading:
            each.cancel()
    percentiles = [round(1e3 * each, 2) for each in statistics.quantiles(taken_s, n=100)]
    return Outcome(len(taken_s), percentiles[49], percentiles[98], without, beside)


async def run(num_requests: int) -> Outcome:
    """With a router of its own."""
    async with running_router(["--http-port", "0"]) as router:
        return await measure(router, num_requests)


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--json", type=Path, help="Write the result there.")
    given = parser.parse_args(args)
    outcome = uvloop.run(run(given.requests))
    text = json.dumps({"environment": environment(), **outcome._asdict()}, indent=1)
    if given.json is not None:
        given.json.write_text(text + "\n")
    print(text)  # noqa: T201
    return 0 if outcome.p99_ms <= MAX_REFUSAL_MS else 1


if __name__ == "__main__":
    sys.exit(main())
