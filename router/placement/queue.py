"""Where requests wait for a placement: bounded, first come first served. Pure."""

from collections import deque
from typing import Protocol

from diptych.errors import QueueFullError

_RETRY_AFTER_S = 1.0


class Waiter(Protocol):
    """A request that wants a placement."""

    def try_place(self, *, room_made: bool) -> bool:
        """Take a placement if there is one; True if it was taken.

        ``room_made``: another request ended, so whoever refused before may take this one.
        """
        ...


class WaitingRoom:
    """The router's queue, and how many requests are on workers.

    Whoever was placed once keeps a slot until ``leave``, and waits in front of
    all others if it must be placed again. Called on the event loop only.
    """

    def __init__(self, *, max_waiting: int, max_placed: int) -> None:
        self._max_waiting = max_waiting
        self._max_placed = max_placed
        self._waiting: deque[Waiter] = deque()
        self._placed: set[Waiter] = set()
        self._num_left = 0  # since the last pump

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_placed(self) -> int:
        return len(self._placed)

    def enter(self, waiter: Waiter, *, front: bool) -> None:
        """Place ``waiter`` at once if nobody is before it and there is room, else let it wait.

        Raises:
            QueueFullError: it would have to wait and nobody else may (never if ``front``).
        """
        if (front or not self._waiting) and self._offer(waiter):
            return
        if front:
            self._waiting.appendleft(waiter)
            return
        if len(self._waiting) >= self._max_waiting:
            raise QueueFullError(
                f"{len(self._waiting)} requests are waiting already",
                retry_after_s=_RETRY_AFTER_S,
                max_queue=str(self._max_waiting),
            )
        self._waiting.append(waiter)

    def stop_waiting(self, waiter: Waiter) -> None:
        """``waiter`` wants no placement any more."""
        if waiter in self._waiting:
            self._waiting.remove(waiter)

    def leave(self, waiter: Waiter) -> None:
        """``waiter`` is done. Idempotent."""
        self.stop_waiting(waiter)
        if waiter in self._placed:
            self._placed.discard(waiter)
            self._num_left += 1

    def pump(self) -> None:
        """Something changed: offer everybody a placement, the first first.

        For each request that left, one that was refused need not sit out its pause.
        """
        num_left, self._num_left = self._num_left, 0
        for number, waiter in enumerate(list(self._waiting)):
            if waiter in self._waiting and self._offer(waiter, room_made=number < num_left):
                self.stop_waiting(waiter)

    def _offer(self, waiter: Waiter, *, room_made: bool = False) -> bool:
        has_slot = waiter in self._placed
        if not has_slot and len(self._placed) >= self._max_placed:
            return False
        self._placed.add(waiter)
        if waiter.try_place(room_made=room_made):
            return True
        if not has_slot:
            self._placed.discard(waiter)
        return False
