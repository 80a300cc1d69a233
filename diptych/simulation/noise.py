"""By how much simulated steps take longer than a step model expects. Pure."""

import math
import random
from functools import lru_cache
from itertools import accumulate
from typing import Final

from diptych.step_model import NINE_OF_TEN

_NUM_DRAWN: Final = 65521  # then it comes again
_LASTING: Final = 1.2  # over what each step has of its own
_LASTS_STEPS: Final = 15.0  # until a third of it is left
_NONE: Final = ((0.0,), (0.0,))


@lru_cache(maxsize=8)  # it takes as long as a short simulation does, and many are of one seed
def _drawn(seed: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Of each step's own noise, and of what lasts: both normal, with a deviation of 1."""
    drawn = random.Random(seed)
    own = tuple(drawn.gauss(0.0, 1.0) for _ in range(_NUM_DRAWN))
    kept = math.exp(-1.0 / _LASTS_STEPS)
    new = math.sqrt(1.0 - kept * kept)
    steps = (new * drawn.gauss(0.0, 1.0) for _ in range(_NUM_DRAWN))
    return own, tuple(accumulate(steps, lambda before, step: kept * before + step))


class Noise:
    """By how much each step takes longer than expected; the same for each run.

    Each step's own noise is the one that a step model tells of, whose workers follow what lasts.
    Steps that only decode wait for memory, of which others on the machine have now more and now
    less: of two that follow one another both are slow, or none (recorded on two kinds of
    processors: 0.34 to 0.6 from one to the next, 0.1 to 0.23 after twenty).
    """

    def __init__(self, seed: int, *, is_on: bool) -> None:
        """One for all engines: each reads it from a place of its own."""
        self._is_on = is_on
        self.renew(seed)

    def renew(self, seed: int) -> None:
        """Steps that begin from now on vary otherwise."""
        self._own, self._lasting = _drawn(seed) if self._is_on else _NONE

    def factor(self, num_step: int, upper_ratio: float, *, only_decodes: bool) -> float:
        """Of a step: of its own noise, one in ten is above ``upper_ratio``, half below one."""
        spread = math.log(max(1.0, upper_ratio)) / NINE_OF_TEN
        place = num_step % len(self._own)
        normal = self._own[place]
        if only_decodes:
            normal += _LASTING * self._lasting[place]
        return math.exp(spread * normal)
