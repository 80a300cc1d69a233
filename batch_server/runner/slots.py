"""Places of lines that are with the routers, of all batches together."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

from batch_server.records import LineOwner
from batch_server.runner.pace import Pace

Sleep = Callable[[float], Awaitable[None]]


class Slots:
    """Tenants take turns, and the batches of each. Event loop only.

    A place goes to the tenant that holds fewest, of several to the one that has waited longest
    since it came or last got one. Its batches go round, and lines of a batch are in order.

    Invariants: no more places are taken than the pace allowed when they were; while somebody
    waits, each that the pace allows is taken. So a change of ``pace`` is made by who has a place.
    """

    def __init__(
        self, pace: Pace, now_s: Callable[[], float], sleep: Sleep = asyncio.sleep
    ) -> None:
        self.pace = pace
        self._now_s = now_s
        self._sleep = sleep
        self._turns = _Turns()
        self._held: Counter[str] = Counter()

    @property
    def num_taken(self) -> int:
        """Places that somebody has."""
        return self._held.total()

    @asynccontextmanager
    async def place(self, owner: LineOwner) -> AsyncIterator[None]:
        """Wait for a place, and until the routers want to be asked; have it for the block."""
        await self._take(owner)
        try:
            while (pause_s := self.pace.pause_s(self._now_s())) > 0:
                await self._sleep(pause_s)
            yield
        finally:
            self._leave(owner)

    async def _take(self, owner: LineOwner) -> None:
        given = asyncio.Event()
        self._turns.add(owner, given)
        self._give()
        try:
            await given.wait()
        except BaseException:
            if given.is_set():  # it had one, and did not learn of it
                self._leave(owner)
            else:
                self._turns.remove(owner, given)
            raise

    def _leave(self, owner: LineOwner) -> None:
        self._held[owner.tenant] -= 1
        self._held += Counter()  # forgets those at 0
        self._give()

    def _give(self) -> None:
        """Places that are free to those whose turn it is. Wakes nobody else."""
        while self._turns and self.num_taken < self.pace.limit:
            owner, given = self._turns.take(self._held)
            self._held[owner.tenant] += 1
            given.set()


class _Turns:
    """Those who wait, in the order of whose turn it is: tenants, then the batches of each. Pure.

    Invariant: who does not wait is not kept; neither are batches and tenants without lines.
    """

    def __init__(self) -> None:
        # of each the next is the first
        self._tenants: dict[str, dict[str, deque[asyncio.Event]]] = {}

    def __bool__(self) -> bool:
        """Whether anybody waits."""
        return bool(self._tenants)

    def add(self, owner: LineOwner, waiter: asyncio.Event) -> None:
        """It waits from now on."""
        batches = self._tenants.setdefault(owner.tenant, {})
        batches.setdefault(owner.batch_id, deque()).append(waiter)

    def remove(self, owner: LineOwner, waiter: asyncio.Event) -> None:
        """One that waits does so no longer; nobody else's turn changes."""
        batches = self._tenants[owner.tenant]
        lines = batches[owner.batch_id]
        lines.remove(waiter)
        if not lines:
            del batches[owner.batch_id]
        if not batches:
            del self._tenants[owner.tenant]

    def take(self, num_held: Mapping[str, int]) -> tuple[LineOwner, asyncio.Event]:
        """The next, which waits no longer; ``num_held``: places by tenant. Somebody waits."""
        tenant = min(self._tenants, key=lambda name: num_held.get(name, 0))
        batches = self._tenants.pop(tenant)
        batch_id = next(iter(batches))
        lines = batches.pop(batch_id)
        waiter = lines.popleft()
        if lines:
            batches[batch_id] = lines
        if batches:
            self._tenants[tenant] = batches
        return LineOwner(tenant, batch_id), waiter
