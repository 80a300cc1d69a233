"""A router over real gRPC, and workers that do as the test says."""

import asyncio
import json
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from diptych.client import (
    DiptychClient,
)
from diptych.errors import DiptychError
from diptych.rpc.channel import open_channel
from diptych.rpc.status import from_rpc_error
from diptych.timers import Timers
from router.app import serve
from router.config import RouterConfig
from tests.call import generate, token_request
from tests.integration.fake_workers import FakeDecode, FakePrefill, FakeWorker, token_at
from tests.waiting import until

PROMPT = list(range(30, 50))
TIMERS = Timers(
    heartbeat_s=0.1,
    lost_peer_s=0.6,
    accept_s=0.25,
    no_worker_s=1.5,
    unsent_s=2.0,
    lame_duck_s=0.0,  # nobody balances load over it, who would have to look away first
    leave_s=0.5,
    drain_s=2.0,
)
# For tests in which nothing is late, whatever else the machine does.
PATIENT = TIMERS.model_copy(
    update={"lost_peer_s": 60.0, "accept_s": 60.0, "no_worker_s": 60.0, "unsent_s": 60.0}
)
EVENTUALLY_S = 5.0
NOTHING: Mapping[str, Any] = {}


@dataclass
class Cluster:
    """A router in this process and its fake workers."""

    address: str
    prefill: list[FakePrefill]
    decode: list[FakeDecode]
    stop: asyncio.Event
    channel: grpc.aio.Channel
    served: "asyncio.Task[None]"

    async def generate(self, max_tokens: int = 6, timeout_s: float = 20.0) -> list[int]:
        """The tokens of one answer; raises its error."""
        request = token_request(PROMPT, max_tokens=max_tokens)
        answer = await generate(self.channel, request, timeout_s=timeout_s)
        if answer.error is not None:
            raise answer.error
        assert answer.token_ids == expected(max_tokens)
        return answer.token_ids

    async def preferred(self, role: str) -> FakeWorker:
        """The worker that this router places on where all are alike."""
        await self.generate()
        workers: list[FakeWorker] = getattr(self, role)
        return next(worker for worker in workers if worker.specs)

    async def stopped(self) -> None:
        """End the router and wait for it."""
        self.stop.set()
        await asyncio.wait([self.served])

    async def generate_for_ever(self) -> None:
        """One short answer after another; raises the first error."""
        while True:
            await self.generate(max_tokens=1)

    def held(self) -> int:
        return sum(len(p.leases) for p in self.prefill) + sum(
            len(d.reservations) for d in self.decode
        )

    async def wait_free(self) -> None:
        await eventually(lambda: self.held() == 0, "leases or reservations are still held")


def expected(num_tokens: int) -> list[int]:
    return [token_at(len(PROMPT) + i) for i in range(num_tokens)]


async def failure_of(call: AsyncIterable[object]) -> DiptychError:
    """What a stream of responses, read to its end, fails with in the end."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return from_rpc_error(caught.value)


async def eventually(condition: Callable[[], bool], what: str) -> None:
    await until(condition, EVENTUALLY_S, what)


@asynccontextmanager
async def running(
    model: Path,
    num_prefill: int = 2,
    num_decode: int = 2,
    *,
    client: Mapping[str, Any] = NOTHING,
    **settings: object,
) -> AsyncIterator[Cluster]:
    """Everything up and every pair proven; at the end nothing may be held.

    ``client``: how a DiptychClient is let in.
    """
    prefill = [FakePrefill() for _ in range(num_prefill)]
    decode = [FakeDecode() for _ in range(num_decode)]
    workers: Sequence[FakeWorker] = [*prefill, *decode]
    for worker in workers:
        await worker.start()
    config = RouterConfig.model_validate(
        {
            "listen": "127.0.0.1:0",
            "model": str(model),
            "prefill": [worker.address for worker in prefill],
            "decode": [worker.address for worker in decode],
            "local_prefill_below_tokens": 0,
            "http": False,
            "timers": TIMERS,
            **settings,
        }
    )
    stop, port = asyncio.Event(), asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as tasks:
        served = tasks.create_task(serve(config, stop, port.set_result))
        address = f"127.0.0.1:{await port}"
        async with open_channel(address) as channel:
            cluster = Cluster(address, prefill, decode, stop, channel, served)
            async with DiptychClient(address, **client) as watcher:
                await wait_ready(watcher, cluster)
            yield cluster
            await cluster.wait_free()
        stop.set()
        await served
    for worker in workers:
        await worker.kill()


@asynccontextmanager
async def serving(
    model: Path, folder: Path, timers: Timers = TIMERS, **settings: Any
) -> AsyncIterator[tuple[Cluster, httpx.AsyncClient]]:
    """One worker of each kind behind a router with HTTP, and a client of it."""
    ports = folder / "ports.json"
    settings = {"http": True, "http_port": 0, "port_file": ports, "timers": timers, **settings}
    async with running(model, 1, 1, **settings) as cluster:
        url = f"http://{json.loads(ports.read_text())['http_address']}"
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            yield cluster, client


async def wait_ready(client: DiptychClient, cluster: Cluster) -> None:
    deadline = time.monotonic() + EVENTUALLY_S
    while not (await client.models())[0].ready or any(
        len(d.pairs) < len(cluster.prefill) for d in cluster.decode
    ):
        assert time.monotonic() < deadline, "never ready"
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.1)  # the last Watch messages
