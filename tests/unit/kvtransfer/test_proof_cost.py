"""What proof may cost: bytes that are looked at. How long that takes is measured elsewhere."""

from typing import Any

import numpy as np
import pytest
import xxhash

from diptych.word_sums import Sums
from kvtransfer import digest, host_sums
from kvtransfer.digest import LINE_BYTES, STRATUM_LINES, coverages
from kvtransfer.memory import HostMemory
from tests.bench import intervals
from tests.bench.digests import BLOCK_BYTES, NUM_BLOCKS, Pair, Sample, book, latency

NUM_BYTES = NUM_BLOCKS * BLOCK_BYTES


class Looking:
    """What digests are made with, counting the bytes that are looked at."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def sums_of(self, data: memoryview) -> Sums:
        self.num_bytes += len(data)
        return host_sums.sums_of(data)

    def sums_of_lines(self, data: memoryview, lines: Any) -> Sums:
        self.num_bytes += LINE_BYTES * len(lines) + len(data) % LINE_BYTES
        return host_sums.sums_of_lines(data, lines)

    def xxh3_128_digest(self, data: bytes) -> bytes:
        self.num_bytes += len(data)
        return xxhash.xxh3_128_digest(data)


@pytest.fixture
def looking(monkeypatch: pytest.MonkeyPatch) -> Looking:
    looking = Looking()
    for name in ("sums_of", "sums_of_lines"):
        monkeypatch.setattr(digest, name, getattr(looking, name))
    monkeypatch.setattr(digest, "xxhash", looking)
    return looking


@pytest.mark.parametrize(
    ("seed", "num_expected"),
    [(0, NUM_BYTES), (1, NUM_BYTES // STRATUM_LINES)],
    ids=["full", "sampled"],
)
def test_a_digest_looks_at_each_byte_once_or_at_few(
    looking: Looking, seed: int, num_expected: int
) -> None:
    assert BLOCK_BYTES % (LINE_BYTES * STRATUM_LINES) == 0
    memory = HostMemory(bytearray(NUM_BYTES), BLOCK_BYTES)
    memory.digests(range(NUM_BLOCKS), coverages([BLOCK_BYTES] * NUM_BLOCKS, seed))
    assert looking.num_bytes == num_expected


def test_the_rest_of_a_proof_looks_at_digests_alone(looking: Looking) -> None:
    book()
    assert looking.num_bytes == 2 * NUM_BLOCKS * digest.DIGEST_BYTES  # by reader and source


def test_latencies_are_compared_pair_by_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts differ by far more than the levels do."""
    monkeypatch.setattr(intervals, "NUM_RESAMPLES", 100)
    rng = np.random.default_rng(3)
    pairs = []
    for _ in range(50):
        prompt_s = rng.uniform(0.1, 10)
        off = Sample(*(np.full(n, prompt_s) for n in (1, 1, 15, 14)))
        full = Sample(*(values * rng.uniform(1.02, 1.04) for values in off))
        pairs.append(Pair(full, off))
    figures = latency(pairs)
    assert figures["num_pairs"] == 50
    for name in Sample._fields:
        figure = figures[name]
        assert figure["full_p99_ms"] > figure["full_median_ms"] > 1000
        for ratio in (figure["median_ratio"], figure["p99_ratio"]):
            low, high = ratio["interval_95"]
            assert 1.02 <= low <= ratio["value"] <= high <= 1.04
            assert ratio["value"] == pytest.approx(1.03, abs=0.01)
