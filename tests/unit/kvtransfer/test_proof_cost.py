"""What proof may cost, against a memcpy of the same bytes in the same process."""

import numpy as np
import pytest

from tests.bench import digests
from tests.bench.digests import Pair, Sample, costs, latency


def test_the_proof_of_a_transfer_stays_cheap() -> None:
    """Measured when the bounds were set: 0.09, 0.86 and 0.47."""
    cost = costs()
    print(cost)  # noqa: T201
    assert cost.bookkeeping_us < 0.25 * cost.memcpy_us
    assert cost.full_us < 2 * cost.memcpy_us
    assert cost.sampled_us < 0.6 * cost.full_us


def test_latencies_are_compared_pair_by_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts differ by far more than the levels do."""
    monkeypatch.setattr(digests, "NUM_RESAMPLES", 100)
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
