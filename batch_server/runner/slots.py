"""Places of lines that are with the routers, of all batches together."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from batch_server.runner.pace import Pace
from batch_server.runner.turns import LineOwner, Turns

Sleep = Callable[[float], Awaitable[None]]


class Slots:
    """Tenants take turns, and batches of each, as :class:`Turns` says. Event loop only.

    Invariants: no more places are taken than the pace allowed when they were; while somebody
    waits, each that the pace allows is taken. So a change of ``pace`` is made by who has a place.
    """

    def __init__(
        self, pace: Pace, now_s: Callable[[], float], sleep: Sleep = asyncio.sleep
    ) -> None:
        self.pace = pace
        self._now_s = now_s
        self._sleep = sleep
        self._turns: Turns[asyncio.Event] = Turns()
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
