"""Requests on their way to a server: most are there at once, and only few may take long.

From the moment that a message is asked for gRPC takes all of it that comes, up to the largest
there may be, and tells nothing of it before it is whole. So what matters is how many are asked for.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Final, TypeVar

from diptych.errors import QueueFullError, SlowClientError
from diptych.shared_room import SharedRoom

T = TypeVar("T")

SLOW_AFTER_S: Final = 1.0
_TURNS = 4  # of a loop that was late, in which what came meanwhile is taken


class Arriving:
    """Owns which requests are slow: those that are not there in their first second.

    No request waits for another. A slow one has a place, or ends; whoever sends them may have as
    many as it leaves free. Event loop only. Invariant: who has its request has no place.
    """

    def __init__(
        self, patience_s: float, most_slow: int, slow_after_s: float = SLOW_AFTER_S
    ) -> None:
        """No request may take longer than ``patience_s``."""
        self._patience_s = patience_s
        self._slow_after_s = slow_after_s
        self._slow = SharedRoom(most_slow, "{} requests are slow to come")

    async def next(self, requests: AsyncIterator[T], sender: str) -> T:
        """The next of a call. Raises StopAsyncIteration, SlowClientError, QueueFullError."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._patience_s) as patience:
                wait = _Wait(self._slow, sender, patience)
                looking = loop.call_later(self._slow_after_s, wait.look)
                try:
                    return await anext(requests)
                finally:
                    looking.cancel()
                    wait.end()
        except TimeoutError:
            if wait.error is not None:
                raise wait.error from None
            raise SlowClientError(
                f"the request did not come within {self._patience_s:g} s"
            ) from None


class _Wait:
    """For one request; ``look`` is called once it is slow."""

    def __init__(self, slow: SharedRoom, sender: str, patience: asyncio.Timeout) -> None:
        self.error: QueueFullError | None = None
        self._slow = slow
        self._sender = sender
        self._patience = patience
        self._loop = asyncio.get_running_loop()
        self._release: Callable[[], None] | None = None
        self._is_over = False

    def look(self, num_turns: int = _TURNS) -> None:
        """Take a place for it, or end it, unless it came while the loop was busy."""
        if self._is_over or self._patience.expired():
            return
        if num_turns:
            self._loop.call_soon(self.look, num_turns - 1)
            return
        try:
            self._slow.admit_piece(self._sender, 1)
        except QueueFullError as error:
            self.error = error
            self._patience.reschedule(self._loop.time())
        else:
            self._release = self._slow.hold(self._sender, 1)

    def end(self) -> None:
        """It is there, or not waited for any more."""
        self._is_over = True
        if self._release is not None:
            self._release()
