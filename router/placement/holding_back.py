"""How long those who are held for their pace hold others back that want none so good. Pure."""

import math
from collections.abc import Iterable, Mapping
from typing import Final

from diptych.request_class import RequestClass

MAX_UNPASSED_S: Final = 10.0  # of one that is held, and of any number of which none is placed
_APART_S: Final = 1.0  # where nobody was held back for so long, what was before does not count


class Paces:
    """What those of a class have to want between two tokens, s, to pass those that are held.

    A batch leaves room to others, so it holds back batches alone. Immutable.
    """

    def __init__(self, most_s: Mapping[RequestClass, float] | None = None) -> None:
        self._most_s = most_s or {}

    def of(self, request_class: RequestClass) -> float:
        """Of that class; inf: they may want anything."""
        return self._most_s.get(request_class, math.inf)

    def behind(self, request_class: RequestClass, tpot_s: float) -> "Paces":
        """Behind one more that is held, of that class and with that pace; inf: with none."""
        if tpot_s >= self.of(request_class):
            return self
        is_batch = request_class is RequestClass.BATCH
        held_back = (RequestClass.BATCH,) if is_batch else tuple(RequestClass)
        tighter = {each: min(tpot_s, self.of(each)) for each in held_back}
        return Paces({**self._most_s, **tighter})

    def behind_all(self, held: Iterable[tuple[RequestClass, float]]) -> "Paces":
        """Behind so many more."""
        tightest: dict[RequestClass, float] = {}
        for request_class, tpot_s in held:
            tightest[request_class] = min(tpot_s, tightest.get(request_class, math.inf))
        paces = self
        for request_class, tpot_s in tightest.items():
            paces = paces.behind(request_class, tpot_s)
        return paces


ANY_PACE: Final = Paces()


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
