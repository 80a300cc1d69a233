"""How far a worker's clock is from the router's, and how surely. Pure."""

from collections import deque
from typing import NamedTuple

_NUM_SAMPLES = 8  # the last: clocks drift, and are set


class ClockOffset(NamedTuple):
    """By how much the worker's clock is ahead of the router's; negative: it is behind.

    The truth is not further from ``offset_s`` than ``uncertainty_s``, as long as neither clock
    was set since.
    """

    offset_s: float
    uncertainty_s: float


class WorkerClock:
    """Learns a worker's clock from questions and answers (Cristian's algorithm).

    The worker looked at its clock at some time between the question and the answer: half the
    round trip bounds the error. The shortest of the last ones is believed.
    """

    def __init__(self) -> None:
        self._samples: deque[ClockOffset] = deque(maxlen=_NUM_SAMPLES)

    @property
    def offset(self) -> ClockOffset | None:
        """None while nothing is known."""
        return min(self._samples, key=lambda sample: sample.uncertainty_s, default=None)

    def told(self, asked_s: float, told_s: float, heard_s: float) -> None:
        """The worker was ``asked_s``, by our clock, said ``told_s``, and was ``heard_s``."""
        half_s = max(0.0, heard_s - asked_s) / 2
        self._samples.append(ClockOffset(told_s - asked_s - half_s, half_s))

    def forget(self) -> None:
        """Another process is there."""
        self._samples.clear()
