"""Places for work that takes its time: tenants come to them by turns."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from diptych.errors import RETRY_LATER_S, QueueFullError


class FairPlaces:
    """So many at once. Owns who waits for one. Event loop only.

    Of tenants that wait each has its turn, however many requests of one do. Where too many wait,
    who came last of the tenant of whom most wait is turned away.
    """

    def __init__(self, num_places: int, max_waiting: int, what: str) -> None:
        """``what`` waits, for people: "long prompts wait to be tokenised"."""
        self._num_free = num_places
        self._max_waiting = max_waiting
        self._what = what
        self._lines: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # by turns
        self._num_waiting = 0

    @asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[None]:
        """Wait for one, and have it until the context ends. Raises QueueFullError."""
        if self._num_free:
            self._num_free -= 1
        else:
            await self._wait(tenant)
        try:
            yield
        finally:
            self._give_back()

    async def _wait(self, tenant: str) -> None:
        if self._num_waiting >= self._max_waiting:
            self._make_room_for(tenant)
        place = asyncio.get_running_loop().create_future()
        self._lines.setdefault(tenant, deque()).append(place)
        self._num_waiting += 1
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled() and place.exception() is None:
                self._give_back()  # it was given at the same moment
            else:
                self._remove(tenant, place)
            raise

    def _make_room_for(self, tenant: str) -> None:
        """Turn away another tenant's newest, if that one has more; raises QueueFullError if not."""
        error = QueueFullError(f"{self._num_waiting} {self._what}", retry_after_s=RETRY_LATER_S)
        num_own = len(self._lines.get(tenant, ()))
        longest = max(self._lines, key=lambda each: len(self._lines[each]), default=tenant)
        if longest == tenant or len(self._lines[longest]) <= num_own + 1:
            raise error
        newest = self._lines[longest][-1]
        self._remove(longest, newest)
        if not newest.done():
            newest.set_exception(error)

    def _give_back(self) -> None:
        """To whose turn it is."""
        while self._lines:
            tenant, line = next(iter(self._lines.items()))
            place = line[0]
            self._remove(tenant, place)
            if tenant in self._lines:
                self._lines.move_to_end(tenant)
            if not place.done():
                place.set_result(None)
                return
        self._num_free += 1

    def _remove(self, tenant: str, place: asyncio.Future[None]) -> None:
        """It waits no more. Idempotent."""
        line = self._lines.get(tenant, deque())
        if place in line:
            line.remove(place)
            self._num_waiting -= 1
            if not line:
                del self._lines[tenant]
