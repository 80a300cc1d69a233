"""What something takes beside what is foretold of it, learned from those that came. Pure."""

import statistics
from collections import deque
from typing import Final

_NUM_LATEST: Final = 31
_STALE_S: Final = 30.0


class Overhead:
    """Messages, and what steps do not tell of themselves: the median of the latest.

    What came between makes some much later, and says nothing of the rest.
    """

    def __init__(self) -> None:
        self.expected_s = 0.0
        self._took_s = _nothing()  # beside the rest; none yet
        self._now_s = self._newest_s = 0.0

    def came_true(self, took_s: float, foretold_s: float, *, is_probe: bool = False) -> None:
        """``foretold_s``: without any overhead. ``is_probe``: others were refused, as too late.

        Where a probe takes much less, what made others late is over, and they are forgotten.
        """
        beside_s = took_s - foretold_s
        if is_probe and beside_s < self.expected_s / 2:
            self._took_s = _nothing()
        self._took_s.append(beside_s)
        self.expected_s = max(0.0, statistics.median(self._took_s))
        self._newest_s = self._now_s

    def age(self, now_s: float) -> None:
        """Forget it where nothing came for long: it may be what keeps others from being tried."""
        self._now_s = now_s
        if self.expected_s and now_s - self._newest_s > _STALE_S:
            self.expected_s, self._took_s = 0.0, _nothing()


def _nothing() -> deque[float]:
    return deque([0.0] * _NUM_LATEST, _NUM_LATEST)
