"""What first tokens take beside the steps that are foretold, learned from those that came. Pure."""

import statistics
from collections import deque
from typing import Final

from router.placement.types import Forecast

_NUM_LATEST: Final = 31  # first tokens


class Overhead:
    """Messages, and what steps do not tell of themselves: the median of the latest.

    What came between makes some first tokens much later, and says nothing of the rest.
    """

    def __init__(self) -> None:
        self.expected_s = 0.0
        self._took_s = deque([0.0] * _NUM_LATEST, _NUM_LATEST)  # beside steps; none yet

    def came_true(self, forecast: Forecast, ttft_s: float) -> None:
        """A first token came; ``forecast`` was made with what was expected then."""
        self._took_s.append(ttft_s - (forecast.chosen.ttft_s - forecast.overhead_s))
        self.expected_s = max(0.0, statistics.median(self._took_s))
