"""Where requests wait for a placement: bounded, first come first served. Pure."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from diptych.errors import DiptychError, QueueFullError

_RETRY_AFTER_S = 1.0


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

    Whoever was placed once keeps a slot until ``leave``, and waits in front of
    all others if it must be placed again. Called on the event loop only. No method
    but ``pump`` calls a waiter, and nothing that a waiter calls pumps: whatever
    changes makes a pump due, which ``schedule`` runs later, once.
    """

    def __init__(
        self,
        *,
        max_waiting: int,
        max_placed: int,
        schedule: Callable[[Callable[[], None]], object],
    ) -> None:
        """``schedule`` calls what it gets soon, from an empty stack."""
        self._max_waiting = max_waiting
        self._max_placed = max_placed
        self._schedule = schedule
        self._waiting: OrderedDict[Waiter, None] = OrderedDict()
        self._placed: set[Waiter] = set()
        self._newcomers: list[Waiter] = []  # since the last pump; they may be turned away
        self._num_left = 0  # since the last pump
        self._is_pump_due = False

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_placed(self) -> int:
        return len(self._placed)

    @property
    def is_pump_due(self) -> bool:
        """Whether a pump was scheduled and has not run."""
        return self._is_pump_due

    def enter(self, waiter: Waiter, *, front: bool) -> None:
        """Let ``waiter`` wait; ``front``: before all others.

        The next pump, soon, places it, lets it wait, or turns it away if nobody else
        may wait (never if ``front``).
        """
        self._waiting[waiter] = None
        if front:
            self._waiting.move_to_end(waiter, last=False)
        else:
            self._newcomers.append(waiter)
        self.pump_soon()

    def take(self, waiter: Waiter) -> None:
        """``waiter`` got a placement: it waits no more and keeps a slot."""
        self.stop_waiting(waiter)
        self._placed.add(waiter)

    def stop_waiting(self, waiter: Waiter) -> None:
        """``waiter`` wants no placement any more. Idempotent."""
        self._waiting.pop(waiter, None)

    def leave(self, waiter: Waiter) -> None:
        """``waiter`` is done. Idempotent."""
        self.stop_waiting(waiter)
        if waiter in self._placed:
            self._placed.discard(waiter)
            self._num_left += 1
            self.pump_soon()

    def pump_soon(self) -> None:
        """Something changed: see to it that there is a pump."""
        if not self._is_pump_due:
            self._is_pump_due = True
            self._schedule(self._pump_if_due)

    def pump(self) -> None:
        """Offer everybody a placement, the first first; then turn away whom there is no place for.

        For each request that left, one that was refused need not sit out its pause.
        """
        self._is_pump_due = False
        num_left, self._num_left = self._num_left, 0
        for number, waiter in enumerate(tuple(self._waiting)):
            if waiter in self._waiting and self._has_slot(waiter):
                waiter.offer(room_made=number < num_left)
        newcomers, self._newcomers = self._newcomers, []
        for waiter in reversed(newcomers):
            if len(self._waiting) <= self._max_waiting:
                break
            if waiter in self._waiting and waiter not in self._placed:
                self._turn_away(waiter)

    def _pump_if_due(self) -> None:
        if self._is_pump_due:
            self.pump()

    def _has_slot(self, waiter: Waiter) -> bool:
        return waiter in self._placed or len(self._placed) < self._max_placed

    def _turn_away(self, waiter: Waiter) -> None:
        self.stop_waiting(waiter)
        error = QueueFullError(
            f"{len(self._waiting)} requests are waiting already",
            retry_after_s=_RETRY_AFTER_S,
            max_queue=str(self._max_waiting),
        )
        waiter.turn_away(error)
