"""How long those who are held for their pace hold others back that want none so good. Pure."""

import math
from typing import Final

MAX_UNPASSED_S: Final = 10.0  # of one that is held, and of any number of which none is placed
_APART_S: Final = 1.0  # where nobody was held back for so long, what was before does not count


class HoldingBack:
    """Of one room. Where it was in vain for too long, nobody is held back for as long again."""

    def __init__(self) -> None:
        self._since_s = -math.inf  # and none that was held was placed
        self._last_s = -math.inf
        self._again_s = -math.inf  # nobody is held back before

    def may(self, now_s: float) -> bool:
        """Whether somebody may be held back now, which is noted."""
        if now_s < self._again_s:
            return False
        if now_s - self._last_s > _APART_S:
            self._since_s = now_s
        if now_s - self._since_s > MAX_UNPASSED_S:
            self._again_s = now_s + MAX_UNPASSED_S
            return False
        self._last_s = now_s
        return True

    def paid_off(self, now_s: float) -> None:
        """One that was held was placed."""
        self._since_s = now_s
