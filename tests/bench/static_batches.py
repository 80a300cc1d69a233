"""Requests in static batches, as servers had them before continuous ones: a point of reference.

They wait until there are enough of them, or the first one has waited for long enough; then these
run to the end of the longest before others may begin.
"""

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple


class _Waiting(NamedTuple):
    """Moments of the loop's clock, s."""

    turn: asyncio.Future[bool]  # whether it has a place
    since_s: float
    due_s: float  # its first token


class StaticBatches:
    """Whose turn it is. Event loop only."""

    def __init__(self, num_requests: int, wait_s: float) -> None:
        """A batch begins with ``num_requests``, or with those there are after ``wait_s``."""
        self._num_requests = num_requests
        self._wait_s = wait_s
        self._waiting: deque[_Waiting] = deque()
        self._num_running = 0

    @asynccontextmanager
    async def place(self, within_s: float = math.inf) -> AsyncIterator[None]:
        """A place in a batch: it begins now, and has ended when all of them have.

        Whose first token is wanted ``within_s``, sooner than a batch begins, takes none: it goes
        on by itself then, so that whoever is asked can refuse it.
        """
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        own = _Waiting(loop.create_future(), now_s, now_s + within_s)
        self._waiting.append(own)
        loop.call_later(self._wait_s, self._begin_if_due)
        self._begin_if_due()
        try:
            await own.turn
            yield
        finally:
            if own in self._waiting:
                self._waiting.remove(own)
            if own.turn.done() and not own.turn.cancelled() and own.turn.result():
                self._num_running -= 1
                self._begin_if_due()

    def _begin_if_due(self) -> None:
        if self._num_running or not self._waiting:
            return
        now_s = asyncio.get_running_loop().time()
        hopeless = [each for each in self._waiting if each.due_s <= now_s]
        for each in hopeless:
            self._waiting.remove(each)
            each.turn.set_result(False)
        if not self._waiting:
            return
        is_full = len(self._waiting) >= self._num_requests
        if is_full or self._waiting[0].since_s + self._wait_s <= now_s:
            self._num_running = min(self._num_requests, len(self._waiting))
            for _ in range(self._num_running):
                self._waiting.popleft().turn.set_result(True)
