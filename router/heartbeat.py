"""A process of a router shows its parent that its event loop turns, by a pipe."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress

from diptych.timers import Timers

_READ_BYTES = 4096


async def beat(fd: int, interval_s: float) -> None:
    """Write a byte to the pipe ``fd`` every so often until cancelled. Whoever reads may be gone."""
    os.set_blocking(fd, False)
    while True:
        with suppress(BlockingIOError, BrokenPipeError):  # the parent hangs, or has ended
            os.write(fd, b".")
        await asyncio.sleep(interval_s)


class Pulse:
    """The parent's end of a pipe to one process. Owns both ends until ``hand_over``; event loop."""

    def __init__(self) -> None:
        """Raises OSError: too many files are open."""
        self._reading, self.fd = os.pipe()
        os.set_blocking(self._reading, False)
        self._is_handed_over = False

    def hand_over(self) -> None:
        """The process has its end, ``fd``: this one keeps none of it. Idempotent."""
        if not self._is_handed_over:
            self._is_handed_over = True
            os.close(self.fd)

    def close(self) -> None:
        """Once, when nobody waits."""
        self.hand_over()
        os.close(self._reading)

    async def until_silent(
        self, timers: Timers, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        """Until nothing came for ``timers.lost_peer_s``.

        Counted in looks at the pipe, not by the clock: where the parent itself, or the machine,
        stood still, that was one look.
        """
        silent_s = 0.0
        while silent_s < timers.lost_peer_s:
            await sleep(timers.heartbeat_s)
            silent_s = 0.0 if self._has_beaten() else silent_s + timers.heartbeat_s

    def _has_beaten(self) -> bool:
        try:
            return bool(os.read(self._reading, _READ_BYTES))
        except BlockingIOError:
            return False
