"""What it costs to run nixl in a process of its own: latency, rate, start, memory, recovery.

    python -m tests.bench.agent_process                  # about a minute
    python -m tests.bench.agent_process --only restart   # or forms

One JSON object; nothing else should run. A reader here and a source in another
process, both with their agents in children ("child") or not ("inside"); the forms
alternate. A read is posted to the transfer thread and awaited on the event loop, as in
a pull, without gRPC and digests. Beside it, what a child spares: the restart of a whole
decode worker with SmolLM2.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from diptych.v1 import worker_pb2
from kvtransfer.endpoint import TransferEndpoint
from kvtransfer.errors import TransportError
from kvtransfer.reader.posted_reads import Landed, ReadGroup
from kvtransfer.reader.quarantine import Quarantine
from kvtransfer.transports.base import Peer
from tests.bench.environment import environment
from tests.cluster import Cluster, running_cluster
from tests.integration.source_process import source_process
from tests.integration.transfer_rig import config, open_reader

BLOCK_BYTES = 64 * 1024
NUM_BLOCKS = 1024
SIZES = {"64 KiB": 1, "1 MiB": 16, "24 MiB": 384}  # blocks of a read
NUM_READS = {"64 KiB": 300, "1 MiB": 100, "24 MiB": 15}
LIMIT_S = 10.0  # for one read, or one agent's recovery: far longer than either takes


async def one_read(endpoint: TransferEndpoint, peer: Peer, num_blocks: int) -> float:
    """Seconds."""
    ended: asyncio.Future[Landed | TransportError] = asyncio.get_running_loop().create_future()
    quarantine = Quarantine(lambda _: None, lambda _: None)
    reads = ReadGroup(endpoint.thread, endpoint.memory, quarantine, "nixl", ended.set_result)
    block_ids = tuple(range(num_blocks))
    copy = peer.read(block_ids, block_ids)
    assert copy is not None
    begun_s = time.perf_counter()
    reads.start(copy, block_ids, first_block=0, num_completed=num_blocks, to_digest=())
    async with asyncio.timeout(LIMIT_S):
        outcome = await ended
    assert isinstance(outcome, Landed), outcome
    return time.perf_counter() - begun_s


async def measure(form: str) -> dict[str, Any]:
    settings = {"nixl_process": form}
    figures: dict[str, Any] = {}
    async with source_process(
        "nixl",
        is_forked=False,
        settings=json.dumps(settings),
        num_blocks=NUM_BLOCKS,
        block_bytes=BLOCK_BYTES,
    ) as source:
        begun_s = time.perf_counter()
        async with open_reader(
            config("nixl", **settings), num_blocks=NUM_BLOCKS, block_bytes=BLOCK_BYTES
        ) as reader:
            figures["start_s"] = round(time.perf_counter() - begun_s, 2)
            reader.pairs.set_peers("router", [source.key])
            await reader.wait_for(source.key, worker_pb2.PAIR_STATE_PROVEN)
            link = reader.pairs._pairs[source.key].link
            assert link is not None
            async with asyncio.TaskGroup() as tasks:
                # The source progresses reads only while somebody fetches; this waits for the
                # rest of the lease, which is never announced.
                fetching = tasks.create_task(reader.pairs.open_pull(source.request).run())
                for name, num_blocks in SIZES.items():
                    await one_read(reader.endpoint, link.peer, num_blocks)
                    taken_s = [
                        await one_read(reader.endpoint, link.peer, num_blocks)
                        for _ in range(NUM_READS[name])
                    ]
                    figures[name] = described(taken_s, num_blocks)
                fetching.cancel()
            figures.update(await at_rest(reader.endpoint, source.process.pid))
    return figures


def described(taken_s: list[float], num_blocks: int) -> dict[str, float]:
    median_s = statistics.median(taken_s)
    return {
        "median_us": round(median_s * 1e6),
        "p99_us": round(sorted(taken_s)[int(0.99 * len(taken_s))] * 1e6),
        "gb_per_s": round(num_blocks * BLOCK_BYTES / median_s / 1e9, 2),
    }


async def at_rest(endpoint: TransferEndpoint, source_pid: int) -> dict[str, Any]:
    """Memory and CPU of processes that do nothing; then how soon a killed agent is replaced."""
    here = psutil.Process()
    children = [child for child in here.children() if child.pid != source_pid]
    before_s = [sum(process.cpu_times()[:2]) for process in (here, *children)]
    await asyncio.sleep(3)
    after_s = [sum(process.cpu_times()[:2]) for process in (here, *children)]
    figures: dict[str, Any] = {
        "idle_cpu_percent": [
            round((b - a) / 3 * 100, 1) for a, b in zip(before_s, after_s, strict=True)
        ],
    }
    for child in children:
        memory = child.memory_full_info()
        figures["child_uss_mb"] = round(memory.uss / 1e6)
        figures["recovery_s"] = await recovery_s(endpoint, child.pid, signal.SIGKILL)
    return figures


async def recovery_s(endpoint: TransferEndpoint, pid: int, number: signal.Signals) -> float:
    """From the signal until another agent is registered."""
    transport = endpoint.transports["nixl"]
    begun_s = time.perf_counter()
    os.kill(pid, number)
    async with asyncio.timeout(LIMIT_S):
        while transport.ready:
            await asyncio.sleep(0.001)
        while not transport.ready:
            await asyncio.sleep(0.001)
    return round(time.perf_counter() - begun_s, 2)


async def worker_restarts(model: str, num_rounds: int) -> list[dict[str, float]]:
    """Of one cluster, one round after the other."""
    with (
        tempfile.TemporaryDirectory() as work,
        running_cluster(Path(work), model, worker_flags={"kv-cache-memory": "512MiB"}) as cluster,
    ):
        await cluster.wait_ready()
        rounds = []
        for _ in range(num_rounds):
            rounds.append(await worker_restart(cluster))
            told("restart", rounds[-1])
        return rounds


async def worker_restart(cluster: Cluster) -> dict[str, float]:
    """From SIGKILL of a whole decode worker until its successor listens, and is ready.

    Ready: the router may place on it and its pair is proven, known to 0.1 s.
    """
    (worker,) = cluster.decode
    begun_s = time.perf_counter()
    worker.kill()
    await cluster.eventually(
        lambda: not cluster.num_proven_pairs(), LIMIT_S, "the router noticed the end"
    )
    worker.start(worker.address)
    await asyncio.to_thread(worker.wait_listening)
    listening_s = time.perf_counter() - begun_s
    await cluster.wait_ready()
    ready_s = time.perf_counter() - begun_s
    return {"listening_s": round(listening_s, 2), "ready_s": round(ready_s, 2)}


def told(what: str, figures: dict[str, Any]) -> None:
    print(what, json.dumps(figures), file=sys.stderr, flush=True)  # noqa: T201


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", choices=("forms", "restart"))
    parser.add_argument("--rounds", type=int, default=3, help="restarts of a worker")
    options = parser.parse_args()
    result: dict[str, Any] = {"environment": environment()}
    if options.only != "restart":
        result["forms"] = []
        for form in ("child", "inside") * 2:
            figures = {"form": form, **asyncio.run(measure(form))}
            told("form", figures)
            result["forms"].append(figures)
    if options.only != "forms":
        result["worker_restarts"] = asyncio.run(worker_restarts("demo", options.rounds))
    json.dump(result, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
