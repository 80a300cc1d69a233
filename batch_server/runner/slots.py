"""Places of lines that are with the routers, of all batches together."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from batch_server.runner.pace import Pace

Sleep = Callable[[float], Awaitable[None]]


class Slots:
    """First come, first served, so that batches take turns. Event loop only.

    Invariant: no more places are taken than the pace allowed when they were.
    """

    def __init__(
        self, pace: Pace, now_s: Callable[[], float], sleep: Sleep = asyncio.sleep
    ) -> None:
        self.pace = pace
        self._now_s = now_s
        self._sleep = sleep
        self._changed = asyncio.Condition()
        self.num_taken = 0

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait for a place, and until the routers want to be asked; have it for the block."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.num_taken < self.pace.limit)
            self.num_taken += 1
        try:
            while (pause_s := self.pace.pause_s(self._now_s())) > 0:
                await self._sleep(pause_s)
            yield
        finally:
            self.num_taken -= 1
            async with self._changed:
                self._changed.notify_all()
