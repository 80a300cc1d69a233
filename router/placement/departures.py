"""How soon a full router may have room again, by how often requests end. Pure."""

from collections.abc import Callable

from router.placement.comeback import comeback_s

_UNKNOWN_S = 1.0  # between two ends, until two were seen
_WEIGHT = 0.1  # of the newest interval in the average


class Departures:
    """The mean time between two requests' ends, as of late; clock and chance are passed in."""

    def __init__(self, clock: Callable[[], float], chance: Callable[[], float]) -> None:
        """``chance`` is uniform in [0, 1); ``clock`` monotonic, s."""
        self._clock = clock
        self._chance = chance
        self._interval_s: float | None = None
        self._last_s: float | None = None

    def left(self, *, others_wait: bool) -> None:
        """A request ended that had been placed.

        How long the next one takes says something only where ``others_wait`` for it.
        """
        now = self._clock()
        if self._last_s is not None:
            interval_s = now - self._last_s
            mean_s = self._interval_s
            self._interval_s = (
                interval_s if mean_s is None else mean_s + _WEIGHT * (interval_s - mean_s)
            )
        self._last_s = now if others_wait else None

    def expected_s(self, num: float) -> float:
        """Until so many requests have ended; 0: it is not known."""
        return num * (self._interval_s or 0.0)

    def next_in_s(self) -> float:
        """Until the next one of those that others wait for is due; 0: by now, or unknown."""
        if self._last_s is None or self._interval_s is None:
            return 0.0
        return max(0.0, self._last_s + self._interval_s - self._clock())

    def retry_after_s(self, num_waiting: int) -> float:
        """When so many that wait have probably been placed; half of it is chance."""
        interval_s = _UNKNOWN_S if self._interval_s is None else self._interval_s
        return comeback_s(num_waiting * interval_s, self._chance)
