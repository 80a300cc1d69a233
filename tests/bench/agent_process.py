"""What it costs to run nixl in a process of its own: latency, rate, start, memory, recovery.

``python -m tests.bench.agent_process``: one JSON object; nothing else should run. A
source and a reader in this process, both with their agents in children ("child") or
here ("inside"); the forms alternate. A read is posted to the transfer thread and
awaited on the event loop, as in a pull, without gRPC and digests.
"""

import asyncio
import json
import os
import signal
import statistics
import sys
import time
from typing import Any

import psutil

from kvtransfer.endpoint import TransferEndpoint
from kvtransfer.quarantine import Quarantine
from kvtransfer.reads import Landed, ReadGroup
from kvtransfer.transport import Peer, TransportError
from tests.integration.transfer_rig import config, open_reader, open_source

BLOCK_BYTES = 64 * 1024
NUM_BLOCKS = 1024
SIZES = {"64 KiB": 1, "1 MiB": 16, "24 MiB": 384}  # blocks of a read
NUM_READS = {"64 KiB": 300, "1 MiB": 100, "24 MiB": 15}


async def one_read(endpoint: TransferEndpoint, peer: Peer, num_blocks: int) -> float:
    """Seconds."""
    ended: asyncio.Future[Landed | TransportError] = asyncio.get_running_loop().create_future()
    quarantine = Quarantine(lambda _: None, lambda _: None)
    reads = ReadGroup(endpoint.thread, endpoint.memory, quarantine, ended.set_result)
    block_ids = tuple(range(num_blocks))
    copy = peer.read(block_ids, block_ids)
    assert copy is not None
    begun_s = time.perf_counter()
    reads.start(copy, block_ids, first_block=0, num_completed=num_blocks, to_digest=())
    outcome = await ended
    assert isinstance(outcome, Landed), outcome
    return time.perf_counter() - begun_s


def children_cpu_s() -> float:
    return sum(sum(child.cpu_times()[:2]) for child in psutil.Process().children())


async def measure(form: str) -> dict[str, Any]:
    settings = config("nixl", nixl_process=form)
    begun_s = time.perf_counter()
    figures: dict[str, Any] = {}
    async with (
        open_source(settings, num_blocks=NUM_BLOCKS, block_bytes=BLOCK_BYTES) as source,
        open_reader(settings, num_blocks=NUM_BLOCKS, block_bytes=BLOCK_BYTES) as reader,
    ):
        figures["start_s"] = (time.perf_counter() - begun_s) / 2
        await reader.connect(source)
        descriptor = source.endpoint.transports["nixl"].descriptor()
        assert descriptor is not None
        transport = reader.endpoint.transports["nixl"]
        peer = await reader.endpoint.thread.call(lambda: transport.connect(descriptor))
        with source.endpoint.serving():
            for name, num_blocks in SIZES.items():
                await one_read(reader.endpoint, peer, num_blocks)
                taken_s = [
                    await one_read(reader.endpoint, peer, num_blocks)
                    for _ in range(NUM_READS[name])
                ]
                median_s = statistics.median(taken_s)
                figures[name] = {
                    "median_us": round(median_s * 1e6),
                    "p99_us": round(sorted(taken_s)[int(0.99 * len(taken_s))] * 1e6),
                    "gb_per_s": round(num_blocks * BLOCK_BYTES / median_s / 1e9, 2),
                }
        children = psutil.Process().children()
        figures["child_rss_mb"] = [
            round((child.memory_info().rss - child.memory_info().shared) / 1e6)
            for child in children
        ]
        before_s, here_s = children_cpu_s(), time.process_time()
        await asyncio.sleep(3)
        figures["idle_cpu_percent"] = {
            "children": round((children_cpu_s() - before_s) / 3 * 100, 2),
            "worker": round((time.process_time() - here_s) / 3 * 100, 2),
        }
        if children:
            figures["recovery_s"] = {
                number.name: await recovery_s(reader.endpoint, children[-1].pid, number)
                for number in (signal.SIGKILL,)
            }
    return figures


async def recovery_s(endpoint: TransferEndpoint, pid: int, number: signal.Signals) -> float:
    """From the signal until another agent is registered."""
    transport = endpoint.transports["nixl"]
    begun_s = time.perf_counter()
    os.kill(pid, number)
    while transport.ready:
        await asyncio.sleep(0.001)
    while not transport.ready:
        await asyncio.sleep(0.001)
    return round(time.perf_counter() - begun_s, 2)


def main() -> None:
    runs = [(form, asyncio.run(measure(form))) for _ in range(2) for form in ("child", "inside")]
    json.dump(runs, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
