"""How much work one answer is worth: a model can be made to say what is slow to take apart."""

import time
from collections.abc import Callable
from typing import Final

_MOST_S: Final = 0.25  # of a whole answer, all of it on an event loop
_FREE_S: Final = 0.0002  # of a piece: what honest text takes, however long it is


class Patience:
    """The CPU time of one answer's parser. One owner.

    Invariant: all pieces together take no longer than ``most_s``, what each has for free aside.
    """

    def __init__(
        self, most_s: float = _MOST_S, clock: Callable[[], float] = time.thread_time
    ) -> None:
        self._left_s = most_s
        self._clock = clock
        self._until = clock() + most_s

    def begin_piece(self) -> None:
        """What is done from here on counts."""
        self._until = self._clock() + self._left_s + _FREE_S

    def end_piece(self) -> None:
        """What is done from here on is somebody else's work."""
        self._left_s = min(self._left_s, self._until - self._clock())

    def left_s(self) -> float:
        """For the next step, above 0. Raises TimeoutError: nothing is left."""
        left_s = self._until - self._clock()
        if left_s <= 0:
            raise TimeoutError
        return left_s
