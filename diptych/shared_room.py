"""Room that holders share, of bytes or of places. Pure.

One may hold as much as it leaves free, so that one alone fills half, and others have room
(Choudhury and Hahne's dynamic thresholds).
"""

from collections import Counter
from collections.abc import Callable

from diptych.errors import RETRY_LATER_S, QueueFullError


class SharedRoom:
    """Owns how much of it is held, and by whom. Event loop only.

    Of each piece the first ``free`` need no room; how many pieces there are is bounded
    elsewhere. Invariant: what ``hold`` counted counts until it is released.
    """

    def __init__(self, most: int, what: str, *, free: int = 0) -> None:
        """``what`` is held, for people, with how much: "requests of {} bytes are open"."""
        self._most = most
        self._free = free
        self._what = what
        self._held: Counter[str] = Counter()
        self._num_held = 0

    @property
    def num_held(self) -> int:
        """Of all together."""
        return self._num_held

    def admit(self, holder: str) -> None:
        """Before there is a piece, whose size nobody knows yet.

        Raises QueueFullError: ``holder`` has as much as is free.
        """
        if self._held[holder] >= self._most - self._num_held:
            raise self._full()

    def admit_piece(self, holder: str, size: int) -> None:
        """Before a piece of that size. Raises QueueFullError, but not for one without need."""
        num = self._needed(size)
        if num:
            self.admit(holder)
        if num > self._most - self._num_held:
            raise self._full()

    def hold(self, holder: str, size: int) -> Callable[[], None]:
        """Count a piece; call what is returned once it is gone."""
        num = self._needed(size)
        self._held[holder] += num
        self._num_held += num

        def release() -> None:
            self._num_held -= num
            self._held[holder] -= num
            if not self._held[holder]:
                del self._held[holder]

        return release

    def _needed(self, size: int) -> int:
        return max(0, size - self._free)

    def _full(self) -> QueueFullError:
        return QueueFullError(self._what.format(self._num_held), retry_after_s=RETRY_LATER_S)
