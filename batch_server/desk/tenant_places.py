"""How many of something tenants do at a time."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from diptych.errors import RETRY_LATER_S, QueueFullError


class TenantPlaces:
    """Bounds of one tenant and of all. Event loop only.

    Invariant: a place is left however its work ends.
    """

    def __init__(self, what: str, *, most_of_tenant: int, most: int) -> None:
        """``what`` is done by those who have the places, for the error."""
        self._what = what
        self._most_of_tenant = most_of_tenant
        self._most = most
        self._taken: Counter[str] = Counter()
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def taken(self, tenant: str) -> Iterator[None]:
        """One of them. Raises QueueFullError."""
        if self._taken[tenant] >= self._most_of_tenant or self._taken.total() >= self._most:
            raise QueueFullError(self._what, retry_after_s=RETRY_LATER_S)
        self._taken[tenant] += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._taken[tenant] -= 1
            self._taken += Counter()  # forgets those at 0
            if not self._taken:
                self._idle.set()

    async def wait_idle(self) -> None:
        """Until nobody has one."""
        await self._idle.wait()
