"""What requests that wait cost a router: its CPU with 256 of them, less that with none.

    python -m tests.bench.waiting [--waiters 256] [--seconds 10] [--full decode|prefill]

A router in a process of its own watches 8 prefill and 8 decode workers that only pretend,
and tell four times a second of a load that changes, as busy ones do. Every decode worker
runs as many sequences as it can; or every prefill worker has a prompt that takes minutes, and
decode workers would compute shorter ones alone. So nothing may be placed.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

import grpc
import psutil
import uvloop

from diptych.rpc.channel import open_channel
from diptych.rpc.server import Context
from diptych.v1 import common_pb2, inference_pb2_grpc, worker_pb2
from tests import metrics
from tests.bench.router_tokens import address_in, child, wait_ready, write_model
from tests.bench.watch_scale import MESSAGES_PER_S
from tests.call import token_request
from tests.integration.fake_workers import BLOCK_SIZE, MAX_LEN, FakeDecode, FakePrefill, FakeWorker

Role = Literal["decode", "prefill"]

_NUM_WORKERS = 8  # of each kind
_MAX_NUM_SEQS = 64
_PROMPT = 20 * list(range(30, 50))
_PATIENCE_S = 600.0
_TOKENS_PER_S = 1.0  # of a prefill worker


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitCost:
    """Shares of a core, 0 to 1, of a router's process."""

    idle: float
    waiting: float
    for_waiting: float  # the difference


class Told(FakeWorker):
    """Says on Watch what a busy worker would, as often."""

    num_running = 0

    async def Watch(
        self, request: worker_pb2.WatchRequest, context: Context
    ) -> AsyncIterator[worker_pb2.WorkerState]:
        number = 0
        while True:
            number += 1
            yield worker_pb2.WorkerState(
                incarnation=self.incarnation,
                role=self.role,
                state=self.state,
                layout=common_pb2.KVLayout(block_size=BLOCK_SIZE, model_digest="m"),
                max_model_len=MAX_LEN,
                max_num_seqs=_MAX_NUM_SEQS,
                num_running=self.num_running,
                num_pending_prefill_tokens=getattr(self, "num_pending_tokens", 0),
                prefill_tokens_per_s=_TOKENS_PER_S,
                progress=common_pb2.EngineProgress(num_steps=number),
                blocks=worker_pb2.BlockCounts(total=4096, free=4000 - number % 100),
                pairs=self.pairs,
                local_prefill=True,
                vocab_size=512,
            )
            await asyncio.sleep(1 / MESSAGES_PER_S)


class ToldPrefill(Told, FakePrefill):
    """A prefill worker."""


class ToldDecode(Told, FakeDecode):
    """A decode worker."""


@asynccontextmanager
async def workers(full: Role) -> AsyncIterator[list[FakeWorker]]:
    """Prefill workers, then decode workers, which may be full from the beginning."""
    started: list[FakeWorker] = [ToldPrefill() for _ in range(_NUM_WORKERS)]
    for prefill in started:
        prefill.behaviour.first_token_s = _PATIENCE_S  # a prompt that comes is never computed
    for _ in range(_NUM_WORKERS):
        decode = ToldDecode()
        decode.num_running = _MAX_NUM_SEQS if full == "decode" else 0
        started.append(decode)
    for worker in started:
        await worker.start()
    try:
        yield started
    finally:
        for worker in started:
            await worker.kill()


async def measure(num_waiters: int, seconds: float, full: Role) -> WaitCost:
    """Shares of a core without and with requests that wait."""
    num_placed = _NUM_WORKERS if full == "prefill" else 0
    async with workers(full) as started:
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder) / "model")
            ports = Path(folder) / "ports.json"
            args = ["--model", f"{folder}/model", "--port-file", str(ports), "--metrics-port", "0"]
            args += [
                "--max-queue",
                str(num_waiters + num_placed),
                "--timers.no-worker-s",
                str(_PATIENCE_S),
            ]
            args += ["--log-level", "error", "--no-http"]
            for worker in started:
                pool = "--prefill" if isinstance(worker, FakePrefill) else "--decode"
                args += [pool, worker.address]
            with child("-m", "router", *args) as process:
                await wait_ready(await asyncio.to_thread(address_in, ports))
                listening = json.loads(ports.read_text())
                idle = await cpu_share(process.pid, seconds)
                async with waiting(listening["address"], num_waiters + num_placed):
                    await wait_waiting(listening["metrics_address"], num_waiters)
                    busy = await cpu_share(process.pid, seconds)
    return WaitCost(idle=idle, waiting=busy, for_waiting=busy - idle)


@asynccontextmanager
async def waiting(address: str, num_waiters: int) -> AsyncIterator[None]:
    """So many requests that nobody answers; cancelled at the end."""
    async with open_channel(address) as channel, asyncio.TaskGroup() as tasks:
        calls = [tasks.create_task(_ask(channel)) for _ in range(num_waiters)]
        yield
        for call in calls:
            call.cancel()


async def _ask(channel: grpc.aio.Channel) -> None:
    try:
        request = token_request(_PROMPT, max_tokens=10)
        async for _ in inference_pb2_grpc.InferenceStub(channel).Generate(request):
            pass
    except grpc.aio.AioRpcError as error:
        sys.stderr.write(f"a request did not wait: {error.details()}\n")


async def wait_waiting(address: str, num_waiters: int) -> None:
    """Until the router has all of them in its queue."""
    async with asyncio.timeout(60):
        num_waiting = 0.0
        while num_waiting < num_waiters:
            await asyncio.sleep(0.2)
            samples = await asyncio.to_thread(metrics.scrape, address)
            num_waiting = samples["diptych_router_requests_waiting"]


async def cpu_share(pid: int, seconds: float) -> float:
    """What share of a core the process used."""
    process = psutil.Process(pid)
    before = process.cpu_times()
    await asyncio.sleep(seconds)
    after = process.cpu_times()
    return (after.user + after.system - before.user - before.system) / seconds


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--waiters", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--full", choices=get_args(Role), default="decode")
    given = parser.parse_args(args)
    cost = uvloop.run(measure(given.waiters, given.seconds, given.full))
    json.dump(asdict(cost), sys.stdout, indent=2)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
