"""What proving a hand-off costs: CPU per transfer at each digest level; TTFT and ITL, full to off.

    .venv/bin/python -m tests.bench.digests --pairs 200 --out digests.json
    .venv/bin/python -m tests.bench.digests --pairs 0      # CPU costs only, 2 s

CPU: one transfer of 512 tokens of SmolLM2 (32 blocks of 720 KiB), announced in eight ranges,
on one thread; both sides' digests together, each over blocks that no cache holds. The unit
is a memcpy of the same bytes in the same process.

Latency: two clusters, one at level full, one at level off, each 1 + 1; pairs of the same fresh
prompt in alternating order. Reported: the median ratio full / off and its 95 % interval
(bootstrap over the pairs).
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import grpc
import numpy as np

from diptych import rpc
from diptych.block_hash import prompt_digest
from diptych.v1 import kv_source_pb2
from kvtransfer.lease import LeaseTable
from kvtransfer.memory import HostMemory, block_digests
from kvtransfer.pull import PullMachine
from tests.bench.handoff import environment
from tests.call import Answer, generate, token_request
from tests.cluster import Cluster, running_cluster

BLOCK_BYTES = 30 * 2 * 3 * 16 * 64 * 4
BLOCK_SIZE = 16
NUM_BLOCKS = 32
NUM_RANGES = 8
NUM_TOKENS = 24  # of each answer in the latency part
RESAMPLES = 2000


class Costs(NamedTuple):
    """CPU of one transfer, µs of one thread."""

    memcpy_us: float
    bookkeeping_us: float
    full_us: float
    sampled_us: float


def costs(repeats: int = 7) -> Costs:
    """The least of so many tries of each, alternating."""
    memory = HostMemory(_pool(), BLOCK_BYTES)
    copies = _pool()
    ids = iter(range(10**9))

    def blocks() -> list[int]:
        """The next blocks of a pool that is too large for any cache."""
        first = next(ids) * NUM_BLOCKS % memory.num_blocks
        return list(range(first, first + NUM_BLOCKS))

    def memcpy() -> None:
        for block_id in blocks():
            start = block_id * BLOCK_BYTES
            copies[start : start + BLOCK_BYTES] = np.frombuffer(memory.block(block_id), np.uint8)

    def digest(seed: int) -> None:
        for _ in ("source", "reader"):
            block_digests(memory, blocks(), seed)

    kinds: dict[str, Callable[[], None]] = {
        "memcpy_us": memcpy,
        "bookkeeping_us": _book,
        "full_us": lambda: digest(0),
        "sampled_us": lambda: digest(random.getrandbits(63) | 1),
    }
    best = dict.fromkeys(kinds, float("inf"))
    for _ in range(repeats):
        for name, run in kinds.items():
            started_ns = time.thread_time_ns()
            run()
            best[name] = min(best[name], (time.thread_time_ns() - started_ns) / 1e3)
    return Costs(**best)


def _pool() -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    return np.random.default_rng(1).integers(0, 255, 6 * NUM_BLOCKS * BLOCK_BYTES, np.uint8)


def _book() -> None:
    """Everything both sides decide about one transfer, without bytes and messages' transport."""
    num_tokens = NUM_BLOCKS * BLOCK_SIZE
    leases = LeaseTable(BLOCK_SIZE, lambda block_id: 0)
    digest = prompt_digest(list(range(num_tokens)))
    leases.open("lease", list(range(NUM_BLOCKS)), num_tokens, digest)
    ticket = os.urandom(16)
    leases.grant("lease", ticket, "reader")
    grant = leases.admit(ticket, "reader", 0)
    machine = PullMachine(
        first_token=0,
        end_token=num_tokens,
        prompt_digest=prompt_digest(list(range(num_tokens))),
        local_block_ids=tuple(range(100, 100 + NUM_BLOCKS)),
        block_size=BLOCK_SIZE,
        block_bytes=BLOCK_BYTES,
        check_digests=True,
        confirm_digest=True,
    )
    machine.opened(kv_source_pb2.FetchOpened(end_token=num_tokens, prompt_digest=digest))
    confirm = None
    for number in range(NUM_RANGES):
        leases.announce("lease", (number + 1) * num_tokens // NUM_RANGES)
        digests = (b"0" * 16,) * (NUM_BLOCKS // NUM_RANGES)
        leases.add_digests(grant.lease, number, digests)
        ready = leases.ready_ranges(grant, number * num_tokens // NUM_RANGES)[0]
        planned = machine.announced(
            kv_source_pb2.Range(
                first_token=ready.first_token,
                num_tokens=ready.num_tokens,
                block_ids=ready.block_ids,
                generations=ready.generations,
                digests=digests,
                last=ready.last,
            )
        )
        confirm = machine.landed(planned.first_block, len(planned.local_block_ids), digests)
    assert confirm is not None
    leases.confirm(grant, 0, confirm.num_tokens, confirm.digest)
    machine.confirmed()
    leases.close("lease")


async def latency(full: Cluster, off: Cluster, num_pairs: int, length: int) -> dict[str, object]:
    """Ratios of TTFT, of the hand-off gap and of each answer's ITL p99."""
    await full.wait_ready()
    await off.wait_ready()
    rng, pairs = random.Random(5), []
    async with rpc.channel(full.router.address) as a, rpc.channel(off.router.address) as b:
        for number in range(num_pairs + 4):
            prompt = [rng.randrange(3, 480) for _ in range(length)]
            first, second = (a, b) if number % 2 else (b, a)
            answers = {first: await _ask(first, prompt), second: await _ask(second, prompt)}
            if number >= 4:  # the first few warm up
                pairs.append((answers[a], answers[b]))
    values: dict[str, Callable[[Answer], float]] = {
        "ttft": lambda answer: answer.timing.ttft_s,
        "handoff_gap": lambda answer: answer.timing.handoff_gap_s,
        "itl_p99": _itl_p99,
    }
    figures: dict[str, object] = {"num_pairs": num_pairs, "prompt_tokens": length}
    figures["kv_bytes"] = pairs[0][0].timing.transfer.num_bytes
    for name, value in values.items():
        ratios = [value(x) / value(y) for x, y in pairs]
        low, high = interval(ratios)
        figures[name] = {
            "full_ms": 1e3 * statistics.median(value(x) for x, _ in pairs),
            "off_ms": 1e3 * statistics.median(value(y) for _, y in pairs),
            "median_ratio": statistics.median(ratios),
            "interval_95": [low, high],
        }
    return figures


async def _ask(channel: grpc.aio.Channel, prompt: list[int]) -> Answer:
    answer = await generate(channel, token_request(prompt, max_tokens=NUM_TOKENS))
    if answer.error is not None:
        raise answer.error
    return answer


def _itl_p99(answer: Answer) -> float:
    gaps = sorted(b - a for a, b in zip(answer.times[1:], answer.times[2:], strict=False))
    return gaps[min(len(gaps) - 1, round(0.99 * len(gaps)))]


def interval(ratios: list[float]) -> tuple[float, float]:
    """95 % interval of the median, by bootstrap."""
    rng = random.Random(1)
    medians = sorted(
        statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES)
    )
    return medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--transport", default="nixl")
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--length", type=int, default=256, help="prompt tokens")
    parser.add_argument("--out", type=Path, default=Path("bench-digests.json"))
    options = parser.parse_args()
    cost = costs()
    result: dict[str, object] = {"environment": environment(), "cpu": cost._asdict()}
    result["cpu_to_memcpy"] = {
        name: value / cost.memcpy_us for name, value in cost._asdict().items()
    }
    if options.pairs:
        flags = {
            "kv-cache-memory": "512MiB",
            "max-model-len": str(options.length + 64),
            "num-threads": "1",
            "transfer.transports": options.transport,
        }
        with tempfile.TemporaryDirectory() as work:
            clusters = [
                running_cluster(
                    Path(work) / level,
                    options.model,
                    worker_flags={**flags, "transfer.digest-level": level},
                    router_flags={"local-prefill-below-tokens": "0"},
                )
                for level in ("full", "off")
            ]
            with clusters[0] as full, clusters[1] as off:
                result["latency"] = asyncio.run(latency(full, off, options.pairs, options.length))
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    json.dump(result, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
