"""Those that wait before all who have fair turns. Pure."""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from operator import itemgetter
from typing import Generic, TypeVar

from diptych.request_class import RequestClass

T = TypeVar("T")


class FrontLine(Generic[T]):
    """Who was placed once and has to be again."""

    def __init__(self) -> None:
        self._arrivals = OrderedDict[T, int]()  # who was asked last is the last
        self._classes: dict[T, RequestClass] = {}
        self._num_of = Counter[RequestClass]()

    def __contains__(self, one: T) -> bool:
        return one in self._arrivals

    def __iter__(self) -> Iterator[T]:
        """Whom ``asked`` named longest ago first."""
        return iter(self._arrivals)

    def __len__(self) -> int:
        return len(self._arrivals)

    def add(self, one: T, arrival: int, request_class: RequestClass) -> None:
        """It has to be placed again; ``arrival``: its number among those that were placed."""
        self._arrivals[one] = arrival
        self._classes[one] = request_class
        self._num_of[request_class] += 1

    def remove(self, one: T) -> None:
        """It waits here no more. Idempotent."""
        if self._arrivals.pop(one, None) is not None:
            self._num_of[self._classes.pop(one)] -= 1

    def num_of(self, request_class: RequestClass) -> int:
        """Of one class."""
        return self._num_of[request_class]

    def asked(self, one: T) -> None:
        """It was asked behind others: they are next."""
        if one in self._arrivals:
            self._arrivals.move_to_end(one)

    @property
    def first(self) -> T | None:
        """Who goes before all others; None: nobody does."""
        return min(self._arrivals, key=self._arrivals.__getitem__, default=None)

    def in_order(self) -> list[T]:
        """As they were placed first."""
        return [one for one, _ in sorted(self._arrivals.items(), key=itemgetter(1))]
