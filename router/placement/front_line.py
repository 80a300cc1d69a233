"""Those that wait before all who have fair turns. Pure."""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from itertools import islice
from operator import itemgetter
from typing import Final, Generic, TypeVar

from diptych.request_class import RequestClass

_MAX_WITHOUT: Final = 128  # of those without a slot, beside as many as there are slots, in a look

T = TypeVar("T")


class FrontLine(Generic[T]):
    """Who was placed once and has to be again, and other choices of a request of which one was.

    The former have slots, and there are no more of them than slots. Of the latter there may be
    thousands, so nothing here looks at all of them. A batch's are behind the turns of all.
    """

    def __init__(self) -> None:
        self._slotted = OrderedDict[T, int]()  # their arrivals; who was asked last is the last
        self._unslotted: dict[T, int] = {}  # by their arrivals
        self._behind: dict[T, int] = {}  # the same, of a batch
        self._classes: dict[T, RequestClass] = {}
        self._num_of = Counter[RequestClass]()

    def __contains__(self, one: T) -> bool:
        return one in self._classes

    def add(self, one: T, arrival: int, request_class: RequestClass, *, has_slot: bool) -> None:
        """Without a slot it comes behind all that are there."""
        if has_slot:
            self._slotted[one] = arrival
        elif request_class is RequestClass.BATCH:
            self._behind[one] = arrival
        else:
            self._unslotted[one] = arrival
        self._classes[one] = request_class
        self._num_of[request_class] += 1

    def remove(self, one: T) -> None:
        """It waits here no more. Idempotent."""
        request_class = self._classes.pop(one, None)
        if request_class is not None:
            self._num_of[request_class] -= 1
            for each in (self._slotted, self._unslotted, self._behind):
                each.pop(one, None)

    def num_of(self, request_class: RequestClass) -> int:
        """Of one class."""
        return self._num_of[request_class]

    @property
    def slotted(self) -> Mapping[T, int]:
        """Those with a slot; whom ``asked`` named longest ago first."""
        return self._slotted

    def asked(self, one: T) -> None:
        """It was asked behind others: they are next."""
        if one in self._slotted:
            self._slotted.move_to_end(one)

    @property
    def first(self) -> T | None:
        """Who goes before all others; None: nobody does."""
        heads = [min(self._slotted.items(), key=itemgetter(1), default=None)]
        heads.append(next(iter(self._unslotted.items()), None))
        return min((each for each in heads if each), key=itemgetter(1), default=(None, 0))[0]

    def before(self, num_slots: int) -> Iterator[T]:
        """Who is asked before turns, as they came; without a slot only if there are some left."""
        slotted = sorted(self._slotted.items(), key=itemgetter(1))
        found = heapq.merge(slotted, _some(self._unslotted, num_slots), key=itemgetter(1))
        return (one for one, _ in found)

    def behind(self, num_slots: int) -> Iterator[T]:
        """The same, who is asked after them."""
        return (one for one, _ in _some(self._behind, num_slots))


def _some(those: Mapping[T, int], num_slots: int) -> list[tuple[T, int]]:
    return list(islice(those.items(), num_slots + _MAX_WITHOUT)) if num_slots > 0 else []
