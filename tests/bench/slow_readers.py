"""Clients that take nothing, or vanish amid their answers, beside ones that read on.

    python -m tests.bench.slow_readers [--readers 1000] [--rounds 3] [--json OUT]

A router in a process of its own, with a worker that only pretends, answers a few good readers
all the time, over gRPC and as server-sent events. In every second round bad readers come beside
them: half never read, of the others the connection breaks off within seconds, and both kinds
speak either protocol. Their answers are long: four kilobytes a step, so that what never reads
is stuck within seconds. Reported: the good ones' gaps between tokens with and without the bad
ones, how the router's memory grew, and how the bad ones' requests ended.
"""

import argparse
import asyncio
import json
import random
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    suppress,
)
from pathlib import Path
from typing import Final, NamedTuple

import grpc
import psutil
import uvloop

from diptych.rpc.channel import open_channel
from diptych.v1 import inference_pb2_grpc
from tests import metrics
from tests.bench.environment import environment
from tests.bench.router_tokens import Router, child, running_router
from tests.bench.token_readers import PROMPT, completion_request, read_grpc, read_sse
from tests.call import token_request

NUM_GOOD: Final = 16  # of each protocol
STEP_S: Final = 0.2
CLIENT_WRITE_S: Final = 5.0
ROUND_S: Final = 50.0
MAX_RATIO: Final = 1.1
MAX_GROWTH_BYTES: Final = 256 * 2**20  # 1,000 answers, all of what one may keep
_VANISHES_WITHIN_S: Final = 5.0
_START_TIMEOUT_S: Final = 60.0
_FOR_EVER: Final = 100_000
_ENDED: Final = 'diptych_requests_total{outcome="'
_SMALL_WINDOW: Final = [
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 65536),
    ("grpc.use_local_subchannel_pool", 1),
]


class Gaps(NamedTuple):
    """Between the tokens of good readers in one round, ms."""

    p50_ms: float
    p99_ms: float


class Good:
    """Readers that take all they are sent; collects the gaps between their tokens."""

    def __init__(self) -> None:
        self._gaps_s: list[float] = []
        self._num_reading = 0

    async def begin(self, router: Router, tasks: asyncio.TaskGroup) -> "list[asyncio.Task[None]]":
        """Read over both protocols, and return when all do."""
        reading = [
            tasks.create_task(self.read(router, f"good-{index}", over_grpc=index % 2 == 0))
            for index in range(2 * NUM_GOOD)
        ]
        async with asyncio.timeout(_START_TIMEOUT_S):
            while self._num_reading < len(reading):
                await asyncio.sleep(STEP_S)
        return reading

    async def read(self, router: Router, name: str, *, over_grpc: bool) -> None:
        """Until cancelled."""
        last_s: float | None = None

        def came(num_tokens: int, stamped: int) -> None:
            nonlocal last_s
            now = time.monotonic()
            if last_s is None:
                self._num_reading += 1
            else:
                self._gaps_s.append(now - last_s)
            last_s = now

        if over_grpc:
            async with open_channel(router.address) as channel:
                await read_grpc(channel, name, _FOR_EVER, came)
        else:
            await read_sse(router.http_port, name, _FOR_EVER, came)

    def forget(self) -> None:
        """All gaps up to now."""
        self._gaps_s.clear()

    def take(self) -> Gaps:
        """Those since the last time."""
        found, self._gaps_s = self._gaps_s, []
        percentiles = statistics.quantiles(found, n=100)
        return Gaps(round(1e3 * percentiles[49], 2), round(1e3 * percentiles[98], 2))


async def be_bad(address: str, http_port: int, num_readers: int) -> None:
    """So many of them, one after the other within a round; its own process."""
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        for number in range(num_readers):
            asked = (
                _asked_grpc(address, f"bad-{number}")
                if number % 4 < 2
                else _asked_sse(http_port, f"bad-{number}")
            )
            patience_s = None if number % 2 else random.uniform(0.0, _VANISHES_WITHIN_S)
            tasks.create_task(_read_nothing(asked, patience_s, stop))
            await asyncio.sleep(ROUND_S / num_readers)
        stop.set()


async def _read_nothing(
    asked: AbstractAsyncContextManager[None], patience_s: float | None, stop: asyncio.Event
) -> None:
    async with asked:
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await stop.wait()


@asynccontextmanager
async def _asked_grpc(address: str, name: str) -> AsyncIterator[None]:
    async with grpc.aio.insecure_channel(address, options=_SMALL_WINDOW) as channel:
        request = token_request(PROMPT, max_tokens=_FOR_EVER, request_id=name)
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request)
        yield
        call.cancel()


@asynccontextmanager
async def _asked_sse(http_port: int, name: str) -> AsyncIterator[None]:
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", http_port))
        client.sendall(completion_request(name, _FOR_EVER))
        yield


class Outcome(NamedTuple):
    """Of all rounds."""

    without: list[Gaps]
    beside: list[Gaps]
    growth_bytes: list[int]  # of the router's memory, until the end of each round with bad ones
    ended: dict[str, float]  # requests by how they ended

    @property
    def ratio(self) -> float:
        """Of the good ones' p99 gap, medians of the rounds."""
        beside, without = (
            statistics.median(each.p99_ms for each in gaps) for gaps in (self.beside, self.without)
        )
        return round(beside / without, 3)

    @property
    def is_within_limits(self) -> bool:
        return self.ratio <= MAX_RATIO and max(self.growth_bytes) <= MAX_GROWTH_BYTES


async def measure(router: Router, num_readers: int, num_rounds: int) -> Outcome:
    """Rounds without and with bad readers, in turn."""
    process, good = psutil.Process(router.pid), Good()
    without, beside, grown = [], [], []
    async with asyncio.TaskGroup() as tasks:
        reading = await good.begin(router, tasks)
        begun = process.memory_info().rss
        for _ in range(num_rounds):
            good.forget()
            await asyncio.sleep(ROUND_S)
            without.append(good.take())
            args = ["--bad", router.address, str(router.http_port), str(num_readers)]
            with child("-m", "tests.bench.slow_readers", *args) as bad:
                await asyncio.to_thread(bad.wait)
            beside.append(good.take())
            grown.append(process.memory_info().rss - begun)
            await _until_alone(router)
        samples = await asyncio.to_thread(metrics.scrape, router.metrics_address)
        for each in reading:
            each.cancel()
    ended = {key[len(_ENDED) : -2]: num for key, num in samples.items() if key.startswith(_ENDED)}
    return Outcome(without, beside, grown, {key: num for key, num in ended.items() if num})


async def _until_alone(router: Router) -> None:
    """Until the router has only the good ones' requests."""
    async with asyncio.timeout(60):
        while router.worker.num_sequences > 2 * NUM_GOOD:
            await asyncio.sleep(0.2)


async def run(num_readers: int, num_rounds: int) -> Outcome:
    """With a router of its own."""
    flags = ["--max-concurrent", str(2 * num_readers), "--timers.client-write-s"]
    flags += [str(CLIENT_WRITE_S), "--http-port", "0", "--metrics-port", "0"]
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(running_router(flags, step_s=STEP_S))
        return await measure(router, num_readers, num_rounds)


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--readers", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="Write the result there.")
    parser.add_argument("--bad", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args(args)
    if given.bad is not None:
        address, http_port, num_readers = given.bad
        uvloop.run(be_bad(address, int(http_port), int(num_readers)))
        return 0
    outcome = uvloop.run(run(given.readers, given.rounds))
    found = {"environment": environment(), **outcome._asdict(), "ratio": outcome.ratio}
    text = json.dumps(found, indent=1)
    if given.json is not None:
        given.json.write_text(text + "\n")
    print(text)  # noqa: T201
    return 0 if outcome.is_within_limits else 1


if __name__ == "__main__":
    sys.exit(main())
