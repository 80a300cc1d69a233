"""Where requests wait for a placement: bounded, first come first served. Pure."""

import bisect
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from diptych.errors import DiptychError, QueueFullError
from router.placement.departures import Departures

# Offers in one pump to the first in line, and as many to those behind, without one being taken.
_MAX_MISSES = 8
# Others may be placed before a request that workers refused so often; then it bars them ...
_MAX_PASSED = 16
# ... for so many pumps at a time, as what it waits for may never come.
_MAX_BARRED = 64

Later = Callable[[Callable[[], None]], object]


class _Returned(NamedTuple):
    arrival: int
    waiter: "Waiter"


class Waiter(Protocol):
    """A request that wants a placement. Only a pump calls it."""

    def offer(self, *, room_made: bool) -> None:
        """Ask for a placement; whoever gets one calls ``WaitingRoom.take`` before it returns.

        ``room_made``: another request ended, so whoever refused before may take this one.
        """
        ...

    def turn_away(self, error: DiptychError) -> None:
        """There is no place to wait; the waiter is out of the queue already."""
        ...


class WaitingRoom:
    """The router's queue, and how many requests are on workers.

    Whoever was placed once keeps a slot until ``leave``, and waits before all who were not,
    in the order in which they came, if it must be placed again. Called on the event loop
    only. No method but ``pump`` calls a waiter, and nothing that a waiter calls pumps:
    whatever changes makes a pump due, which ``schedule`` runs later, once.

    A pump ends early where no worker has room, or after some offers in vain: those who came
    since the last one and the first in line are always asked, of the others some, in turn.
    """

    def __init__(
        self,
        *,
        max_waiting: int,
        max_placed: int,
        schedule: Later,
        schedule_rest: Later | None = None,
        has_room: Callable[[], bool] = lambda: True,
        departures: Departures | None = None,
    ) -> None:
        """``schedule`` calls what it gets soon, from an empty stack; ``schedule_rest`` after a
        pause, for those whom a pump did not reach. ``has_room``: whether a worker might take any.
        """
        self._max_waiting = max_waiting
        self._max_placed = max_placed
        self._schedule = schedule
        self._schedule_rest = schedule_rest or schedule
        self._has_room = has_room
        self._departures = departures or Departures(lambda: 0.0, lambda: 0.5)
        self._arrivals = itertools.count()
        self._returned: list[_Returned] = []  # were placed before; by their arrival
        self._fresh: OrderedDict[Waiter, None] = OrderedDict()
        self._placed: dict[Waiter, int] = {}  # to their arrival
        self._newcomers: list[Waiter] = []  # since the last pump; they may be turned away
        self._num_left = 0  # since the last pump
        self._next_turn = 0  # whose turn it is, of those who are not the first in line
        self._num_passed = 0  # placed before the first of those who returned, since it is first
        self._num_barred = 0  # pumps in which it barred the others
        self._is_pump_due = False
        self._is_rest_due = False

    @property
    def num_waiting(self) -> int:
        return len(self._returned) + len(self._fresh)

    @property
    def num_placed(self) -> int:
        return len(self._placed)

    def enter(self, waiter: Waiter, *, front: bool) -> None:
        """Let ``waiter`` wait; ``front``: it was placed before, so before all who were not.

        So do the other choices of a request of which one was placed: without slots yet.

        The next pump, soon, places it, lets it wait, or turns it away if nobody else
        may wait (never if ``front``).
        """
        if front:
            arrival = self._placed.get(waiter)
            if arrival is None:
                arrival = next(self._arrivals)
            bisect.insort(self._returned, _Returned(arrival, waiter), key=lambda one: one.arrival)
        else:
            self._fresh[waiter] = None
            self._newcomers.append(waiter)
        self.pump_soon()

    def take(self, waiter: Waiter) -> None:
        """``waiter`` got a placement: it waits no more and keeps a slot."""
        if self._returned and waiter is not self._returned[0].waiter:
            self._num_passed += 1
        self.stop_waiting(waiter)
        if waiter not in self._placed:
            self._placed[waiter] = next(self._arrivals)

    def stop_waiting(self, waiter: Waiter) -> None:
        """``waiter`` wants no placement any more. Idempotent."""
        self._fresh.pop(waiter, None)
        if self._returned and waiter is self._returned[0].waiter:
            self._num_passed = self._num_barred = 0
        self._returned = [one for one in self._returned if one.waiter is not waiter]

    def leave(self, waiter: Waiter) -> None:
        """``waiter`` is done. Idempotent."""
        self.stop_waiting(waiter)
        if self._placed.pop(waiter, None) is not None:
            self._num_left += 1
            self._departures.left()
            self.pump_soon()

    def pump_soon(self) -> None:
        """Something changed: see to it that there is a pump."""
        if not self._is_pump_due:
            self._is_pump_due = True
            self._schedule(self._pump_if_due)

    def pump(self) -> None:
        """Offer placements, to the first first; then turn away whom there is no place for.

        For each request that left, one that was refused need not sit out its pause.
        """
        self._is_pump_due = False
        newcomers, self._newcomers = self._newcomers, []
        if self._is_barred():
            self._ask([self._returned[0].waiter], set())
            if self.num_waiting and self._has_room():
                self._pump_rest_soon()
        else:
            self._ask_in_turn(newcomers)
        for waiter in reversed(newcomers):
            if self.num_waiting <= self._max_waiting:
                break
            if waiter in self._fresh:
                self._turn_away(waiter)

    def _ask_in_turn(self, newcomers: list[Waiter]) -> None:
        waiting = [one.waiter for one in self._returned]
        if len(self._placed) < self._max_placed:
            waiting.extend(self._fresh)
        asked: set[Waiter] = set()
        self._ask(waiting, asked)
        behind = [waiter for waiter in waiting if waiter not in asked]
        turn = self._next_turn % len(behind) if behind else 0
        num_asked = len(asked)
        self._ask([*behind[turn:], *behind[:turn]], asked)
        self._next_turn = turn + len(asked) - num_asked
        self._ask(newcomers, asked)
        if len(asked) == len(waiting):
            self._num_left = 0
        elif self._has_room():
            self._pump_rest_soon()

    def _ask(self, line: Iterable[Waiter], asked: set[Waiter]) -> None:
        """Offer placements to those who were not asked yet, until too many were in vain."""
        num_misses = 0
        for waiter in line:
            if num_misses >= _MAX_MISSES or not self._has_room():
                return
            has_slot = waiter in self._placed or len(self._placed) < self._max_placed
            if waiter in asked or not has_slot or not self._is_waiting(waiter):
                continue
            asked.add(waiter)
            room_made = self._num_left > 0
            self._num_left -= room_made
            waiter.offer(room_made=room_made)
            num_misses += self._is_waiting(waiter)

    def _is_barred(self) -> bool:
        """Whether nobody may pass the first of those who returned, as too many did already."""
        if self._num_passed < _MAX_PASSED:
            return False
        self._num_barred += 1
        if self._num_barred > _MAX_BARRED:
            self._num_passed = self._num_barred = 0
        return self._num_passed > 0

    def _is_waiting(self, waiter: Waiter) -> bool:
        return waiter in self._fresh or any(one.waiter is waiter for one in self._returned)

    def _pump_if_due(self) -> None:
        if self._is_pump_due:
            self.pump()

    def _pump_rest_soon(self) -> None:
        if not self._is_rest_due:
            self._is_rest_due = True
            self._schedule_rest(self._pump_rest)

    def _pump_rest(self) -> None:
        self._is_rest_due = False
        self.pump()

    def _turn_away(self, waiter: Waiter) -> None:
        self.stop_waiting(waiter)
        error = QueueFullError(
            f"{self.num_waiting} requests are waiting already",
            retry_after_s=self._departures.retry_after_s(self.num_waiting),
            max_queue=str(self._max_waiting),
        )
        waiter.turn_away(error)
