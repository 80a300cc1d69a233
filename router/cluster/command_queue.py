"""What one stream still has to send to its peer, and the heartbeats in between."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

from diptych.timers import Timers

C = TypeVar("C")


class CommandQueue(Generic[C]):
    """An unbounded-looking, watched queue: ``put`` never waits, ``problem`` tells when it is stuck.

    One per stream, so that a stream that ended can take nothing from the next one.
    Its ``commands`` are the stream's request iterator. Event loop only.
    """

    def __init__(self, timers: Timers, heartbeat: Callable[[], C], *, max_unsent: int) -> None:
        self._timers = timers
        self._heartbeat = heartbeat
        self._max_unsent = max_unsent
        self._loop = asyncio.get_running_loop()
        self._commands: deque[C] = deque()
        self._wake = asyncio.Event()
        self._ended = False
        self._moved_at_s = self._loop.time()

    def put(self, command: C) -> None:
        """Send after everything that was put before; nothing once ended."""
        if self._ended:
            return
        if not self._commands:
            self._moved_at_s = self._loop.time()
        self._commands.append(command)
        self._wake.set()

    def end(self) -> None:
        """Half-close the stream at once; what is unsent is dropped."""
        self._ended = True
        self._commands.clear()
        self._wake.set()

    async def commands(self) -> AsyncIterator[C]:
        """The stream's requests: what was put, and a heartbeat each period."""
        heartbeat_at_s = self._loop.time() + self._timers.heartbeat_s
        while not self._ended:
            if self._loop.time() >= heartbeat_at_s:
                heartbeat_at_s = self._loop.time() + self._timers.heartbeat_s
                yield self._heartbeat()
            if self._commands:
                self._moved_at_s = self._loop.time()
                yield self._commands.popleft()
                continue
            self._wake.clear()
            try:
                async with asyncio.timeout_at(heartbeat_at_s):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def problem(self) -> str | None:
        """Why the stream is to be given up; None while it moves."""
        if len(self._commands) > self._max_unsent:
            return f"{len(self._commands)} commands are unsent"
        stuck_s = self._loop.time() - self._moved_at_s
        if self._commands and stuck_s > self._timers.unsent_s:
            return f"commands are unsent for {stuck_s:.1f} s"
        return None
