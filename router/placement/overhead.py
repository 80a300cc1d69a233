"""What something takes beside what is foretold of it, learned from those that came. Pure."""

import statistics
from collections import deque
from typing import Final

_NUM_LATEST: Final = 31


class Overhead:
    """Messages, and what steps do not tell of themselves: the median of the latest.

    What came between makes some much later, and says nothing of the rest.
    """

    def __init__(self) -> None:
        self.expected_s = 0.0
        self._took_s = deque([0.0] * _NUM_LATEST, _NUM_LATEST)  # beside the rest; none yet

    def came_true(self, took_s: float, foretold_s: float) -> None:
        """``foretold_s``: without any overhead."""
        self._took_s.append(took_s - foretold_s)
        self.expected_s = max(0.0, statistics.median(self._took_s))
