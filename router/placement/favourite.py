"""Who goes before all others of a queue, and how long these wait for it. Pure."""

import itertools
from typing import Final, Generic, Protocol, TypeVar

from router.placement.front_line import FrontLine

# Others may be placed so often before one that waits again has what it needs; then it bars them ...
_MAX_PASSED: Final = 16
# ... for so long at a time, s, as what it waits for may never come: twice as many pass it then.
_MAX_BARRED_S: Final = 2.0
_MAX_LOOKS: Final = 8  # of those behind it, for one that lacks room alone


class Returned(Protocol):
    """Who was placed once, and has to be again."""

    def may_come(self) -> bool:
        """Whether it is room alone that it lacks: workers that are there could take it."""
        ...


T = TypeVar("T", bound=Returned)


class Favourite(Generic[T]):
    """The first of a front line, which bars all others where too many passed it.

    While it is placed it is waited for: until workers have granted it all, others would take what
    it asks for. One that no worker which is there could take bars nobody, however much room there
    were; the next one that some could take is waited for instead.
    """

    def __init__(self, front: FrontLine[T]) -> None:
        self._front = front
        self.one: T | None = None  # it returned, and was not granted all it needs yet
        self._num_passed = 0  # others that were placed meanwhile
        self._may_pass = _MAX_PASSED
        self._barred_since_s: float | None = None  # by it; None: it bars nobody

    def entered(self) -> None:
        """One more is in the front line."""
        if self.one is None:
            self.follow()

    def follow(self) -> None:
        """It has what it needs, or wants it no more: the next one is favoured."""
        self.one = self._front.first
        self._num_passed, self._barred_since_s, self._may_pass = 0, None, _MAX_PASSED

    def placed(self, other: T) -> None:
        """Another one was, or it was itself."""
        self._num_passed += self.one is not None and other is not self.one

    def bars(self, now_s: float) -> bool:
        """Whether nobody may pass it, as too many did already."""
        if self.one is None or self._num_passed < self._may_pass:
            return False
        if not self._is_awaited():
            self._barred_since_s = None
            return False
        if self._barred_since_s is None:
            self._barred_since_s = now_s
        if now_s - self._barred_since_s > _MAX_BARRED_S:
            self._num_passed, self._barred_since_s = 0, None
            self._may_pass *= 2
        return self._num_passed > 0

    def _is_awaited(self) -> bool:
        """Whether what it waits for may come; if not so, what one of the next waits for."""
        if self.one is None or self.one not in self._front:
            return True
        few = itertools.islice(self._front.in_order(), _MAX_LOOKS)
        found = next((each for each in few if each.may_come()), None)
        if found is not None and found is not self.one:
            self.one, self._barred_since_s, self._may_pass = found, None, _MAX_PASSED
        return found is not None
