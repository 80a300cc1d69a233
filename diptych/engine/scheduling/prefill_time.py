"""How much of an engine's time goes into prompts. Pure.

Of a step with parts of prompts that is what it takes longer than one without: sequences that decode
have a token with either. Where little is to be computed of a prompt it is hardly anything.
"""

import math
from collections.abc import Callable
from typing import Final

_FADING_S: Final = 5.0  # after which a step counts for a third
_IDLE_S: Final = 1.0  # that are taken to have been before the first


class PrefillTime:
    """Time that prompts took, as of late: the past fades. Owned by the engine."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock`` in s."""
        self._clock = clock
        self._spent_s = 0.0
        self._at_s = 0.0
        self._began_s: float | None = None  # a little before the first of them

    def add(self, duration_s: float) -> None:
        """A step with parts of prompts has just ended, which took so much longer for them."""
        now_s = self._clock()
        if self._began_s is None:
            self._began_s = now_s - duration_s - _IDLE_S
        self._spent_s, self._at_s = self._left_s() + duration_s, now_s

    @property
    def ratio(self) -> float:
        """Of the time that counts; 0 before the first."""
        if self._began_s is None:
            return 0.0
        counts_s = _FADING_S * -math.expm1((self._began_s - self._clock()) / _FADING_S)
        return min(1.0, self._left_s() / counts_s)

    def _left_s(self) -> float:
        return self._spent_s * math.exp((self._at_s - self._clock()) / _FADING_S)
