"""What a histogram says of the last moments, rather than of all since the start. Pure."""

from collections import deque
from typing import NamedTuple

from prometheus_client.registry import Collector


class RecentDistribution(NamedTuple):
    """Quantiles are None where nothing was measured; those above the last bound are that bound."""

    num_samples: int
    p50: float | None
    p95: float | None


class RecentHistogram:
    """Compares a histogram with what it was, all label values together.

    Its owner calls ``remember`` at even intervals; ``distribution`` is of the last
    ``num_intervals`` of them and what came since. Event loop only.
    """

    def __init__(self, histogram: Collector, num_intervals: int) -> None:
        self._histogram = histogram
        self._remembered: deque[dict[float, float]] = deque(maxlen=num_intervals)

    def remember(self) -> None:
        """One interval is over."""
        self._remembered.append(self._counts())

    @property
    def num_samples(self) -> int:
        """Since the start."""
        return round(max(self._counts().values(), default=0.0))

    def distribution(self) -> RecentDistribution:
        """As of now."""
        before = self._remembered[0] if self._remembered else {}
        counts = {bound: n - before.get(bound, 0.0) for bound, n in self._counts().items()}
        num_samples = round(max(counts.values(), default=0.0))
        if not num_samples:
            return RecentDistribution(0, None, None)
        ascending = sorted(counts.items())
        return RecentDistribution(
            num_samples, _quantile(ascending, 0.5), _quantile(ascending, 0.95)
        )

    def _counts(self) -> dict[float, float]:
        """How many are at most each bound."""
        counts: dict[float, float] = {}
        for family in self._histogram.collect():
            for sample in family.samples:
                if sample.name.endswith("_bucket"):
                    bound = float(sample.labels["le"])
                    counts[bound] = counts.get(bound, 0.0) + sample.value
        return counts


def _quantile(ascending: list[tuple[float, float]], share: float) -> float:
    """Between a bucket's bounds, as if its samples lay evenly there."""
    wanted = share * ascending[-1][1]
    lower, below = 0.0, 0.0
    for bound, count in ascending:
        if count >= wanted and count > below:
            if bound == float("inf"):
                return lower
            return lower + (bound - lower) * (wanted - below) / (count - below)
        lower, below = bound, count
    return lower
