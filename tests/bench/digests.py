"""What proving a hand-off costs: CPU per transfer at each digest level; TTFT and ITL, full to off.

    .venv/bin/python -m tests.bench.digests --pairs 200 --out digests.json    # about 7 minutes
    .venv/bin/python -m tests.bench.digests --pairs 0                         # CPU costs only, 2 s

CPU: one transfer of 512 tokens of SmolLM2 (32 blocks of 720 KiB), announced in eight ranges,
on one thread; both sides' digests together, each over blocks that no cache holds. The unit
is a memcpy of the same bytes in the same process.

Latency: two clusters, one at level full, one at level off, each 1 + 1; pairs of the same fresh
prompt in alternating order, one request at a time. Reported of each figure, both with their
95 % interval (bootstrap over the pairs): the median over the pairs of the ratio full / off, and
the ratio of the p99s over all answers of a level. Every ten pairs the median ratios so far go
to stderr; when interrupted (SIGINT, SIGTERM) it reports what it has.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import xxhash

from diptych.block_hash import prompt_digest
from diptych.rpc.channel import open_channel
from diptych.v1 import kv_source_pb2
from kvtransfer.digest import coverages
from kvtransfer.memory import HostMemory
from kvtransfer.reader.pull_machine import DigestChecks, PullMachine
from kvtransfer.source.lease_table import LeaseTable
from tests.bench.environment import environment
from tests.bench.intervals import Indices, estimate
from tests.call import generate, token_request
from tests.cluster import Cluster, running_cluster

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

BLOCK_BYTES = 30 * 2 * 3 * 16 * 64 * 4
BLOCK_SIZE = 16
NUM_BLOCKS = 32
NUM_RANGES = 8
NUM_TOKENS = 12  # of each answer in the latency part
VOCAB = 49_000  # of the demo model, about
NUM_WARM_UP = 4  # pairs
REPORT_EVERY = 10  # pairs


class Costs(NamedTuple):
    """CPU of one transfer, µs of one thread."""

    memcpy_us: float
    bookkeeping_us: float
    full_us: float
    sampled_us: float
    xxh3_us: float  # of every byte: what no device computes, for comparison


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
            memory.digests(blocks(), coverages([BLOCK_BYTES] * NUM_BLOCKS, seed))

    def xxh3() -> None:
        for _ in ("source", "reader"):
            for block_id in blocks():
                xxhash.xxh3_128_digest(memory.block(block_id))

    kinds: dict[str, Callable[[], None]] = {
        "memcpy_us": memcpy,
        "bookkeeping_us": book,
        "full_us": lambda: digest(0),
        "sampled_us": lambda: digest(random.getrandbits(63) | 1),
        "xxh3_us": xxh3,
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


def book() -> None:
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
        num_bytes_of=lambda index: BLOCK_BYTES,
        checks=DigestChecks(each_block=True, in_confirm=True),
    )
    machine.begin(frozenset())
    machine.opened(kv_source_pb2.FetchOpened(end_token=num_tokens, prompt_digest=digest))
    confirm = None
    for number in range(NUM_RANGES):
        leases.announce("lease", (number + 1) * num_tokens // NUM_RANGES)
        digests = (b"0" * 16,) * (NUM_BLOCKS // NUM_RANGES)
        leases.add_digests(grant.lease, number, digests)
        ready = leases.ready_ranges(grant, number * num_tokens // NUM_RANGES)[0]
        (planned,) = machine.announced(
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


class Sample(NamedTuple):
    """One answer, in s."""

    ttft: Floats  # [1]
    handoff_gap: Floats  # [1]
    itl: Floats  # [NUM_TOKENS - 1]: every gap, that of the hand-off too
    itl_after_handoff: Floats  # [NUM_TOKENS - 2]


class Pair(NamedTuple):
    """The same prompt at both levels."""

    full: Sample
    off: Sample


async def measure_pairs(
    full: Cluster, off: Cluster, num_pairs: int, length: int, pairs: list[Pair]
) -> None:
    """Adds to ``pairs`` one by one, so that they outlive a cancellation."""
    await full.wait_ready()
    await off.wait_ready()
    rng = random.Random(5)
    async with open_channel(full.router.address) as a, open_channel(off.router.address) as b:
        for number in range(num_pairs + NUM_WARM_UP):
            prompt = [rng.randrange(100, VOCAB) for _ in range(length)]
            first, second = (a, b) if number % 2 else (b, a)
            samples = {first: await _ask(first, prompt), second: await _ask(second, prompt)}
            if number >= NUM_WARM_UP:
                pairs.append(Pair(samples[a], samples[b]))
                if len(pairs) % REPORT_EVERY == 0:
                    print(progress(pairs), file=sys.stderr, flush=True)  # noqa: T201


async def _ask(channel: grpc.aio.Channel, prompt: list[int]) -> Sample:
    answer = await generate(channel, token_request(prompt, max_tokens=NUM_TOKENS))
    if answer.error is not None:
        raise answer.error
    gaps = np.zeros(NUM_TOKENS - 1)  # 0 between tokens that came in one response
    gaps[: len(answer.times) - 1] = np.diff(answer.times)
    timing = answer.timing
    return Sample(np.array([timing.ttft_s]), np.array([timing.handoff_gap_s]), gaps, gaps[1:])


def latency(pairs: Sequence[Pair]) -> dict[str, Any]:
    figures = {name: compared(full, off) for name, full, off in by_figure(pairs)}
    return {"num_pairs": len(pairs), **figures}


def progress(pairs: Sequence[Pair]) -> str:
    """The median ratios so far."""
    ratios = [
        f"{name} {np.median(pair_ratios(full, off)):.3f}" for name, full, off in by_figure(pairs)
    ]
    return f"{len(pairs)} pairs, full / off: " + ", ".join(ratios)


def by_figure(pairs: Sequence[Pair]) -> Iterator[tuple[str, Floats, Floats]]:
    """Its name and the values at both levels, each [num_pairs, values of an answer], in s."""
    for name in Sample._fields:
        full = np.stack([getattr(pair.full, name) for pair in pairs])
        off = np.stack([getattr(pair.off, name) for pair in pairs])
        yield name, full, off


def compared(full: Floats, off: Floats) -> dict[str, Any]:
    """Both levels in ms, and two ratios full / off."""
    num_pairs = len(full)
    ratios = pair_ratios(full, off)
    return {
        "full_median_ms": 1e3 * float(np.median(full)),
        "off_median_ms": 1e3 * float(np.median(off)),
        "full_p99_ms": 1e3 * float(np.percentile(full, 99)),
        "off_p99_ms": 1e3 * float(np.percentile(off, 99)),
        "median_ratio": with_interval(lambda chosen: np.median(ratios[chosen]), num_pairs),
        "p99_ratio": with_interval(
            lambda chosen: np.percentile(full[chosen], 99) / np.percentile(off[chosen], 99),
            num_pairs,
        ),
    }


def pair_ratios(full: Floats, off: Floats) -> Floats:
    """Of each pair, p99 of one answer to p99 of the other."""
    ratios: Floats = np.percentile(full, 99, axis=1) / np.percentile(off, 99, axis=1)
    return ratios


def with_interval(
    statistic: Callable[[Indices], "np.floating[Any]"], num_pairs: int
) -> dict[str, Any]:
    """``statistic`` of all pairs, and its 95 % interval."""
    value, low, high = estimate(statistic, num_pairs)
    return {"value": value, "interval_95": [low, high]}


@contextmanager
def two_clusters(model: str, transport: str, length: int) -> Iterator[tuple[Cluster, Cluster]]:
    """At level full, and at level off."""
    flags = {
        "kv-cache-memory": "512MiB",
        "max-model-len": str(length + 64),
        "num-threads": "1",
        "transfer.transports": transport,
    }
    with tempfile.TemporaryDirectory() as work, ExitStack() as stack:
        full, off = (
            stack.enter_context(
                running_cluster(
                    Path(work) / level,
                    model,
                    worker_flags={**flags, "transfer.digest-level": level},
                    router_flags={"local-prefill-below-tokens": "0"},
                )
            )
            for level in Pair._fields
        )
        yield full, off


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--transport", default="nixl")
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--length", type=int, default=256, help="prompt tokens")
    parser.add_argument("--out", type=Path, default=Path("bench-digests.json"))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    cost = costs()
    result: dict[str, object] = {"environment": environment(), "cpu": cost._asdict()}
    result["cpu_to_memcpy"] = {
        name: value / cost.memcpy_us for name, value in cost._asdict().items()
    }
    pairs: list[Pair] = []
    try:
        if options.pairs:
            with two_clusters(options.model, options.transport, options.length) as clusters:
                asyncio.run(measure_pairs(*clusters, options.pairs, options.length, pairs))
    finally:
        if pairs:
            result["latency"] = {"prompt_tokens": options.length, **latency(pairs)}
        options.out.write_text(json.dumps(result, indent=1) + "\n")
        json.dump(result, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
