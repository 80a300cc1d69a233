"""How sure a figure is that was measured many times."""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np

Indices = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

NUM_RESAMPLES: Final = 2000


class Estimate(NamedTuple):
    """A figure, and where it lies with 95 % probability."""

    value: float
    low: float
    high: float


def estimate(statistic: Callable[[Indices], "np.floating[Any]"], num_samples: int) -> Estimate:
    """``statistic`` of the samples that it is given by index; the interval is by bootstrap."""
    rng = np.random.default_rng(1)
    resampled = [
        statistic(rng.integers(num_samples, size=num_samples)) for _ in range(NUM_RESAMPLES)
    ]
    low, high = np.percentile(resampled, (2.5, 97.5))
    return Estimate(float(statistic(np.arange(num_samples))), float(low), float(high))


def median(samples: "np.ndarray[Any, Any] | list[float]") -> Estimate:
    """Of all samples."""
    values = np.asarray(samples)
    return estimate(lambda chosen: np.median(values[chosen]), len(values))
