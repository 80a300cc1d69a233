"""An event loop for what waits for nothing but itself: no files, no timers, no other threads.

It runs when it is told to, for so many rounds, and asks the system for nothing: the stdlib's asks
in each round whether a file is ready, which takes most of the time of a round in which little
happens.
"""

import asyncio
from asyncio.events import _set_running_loop
from collections import deque


class SteppedLoop(asyncio.BaseEventLoop):
    """Of the stdlib's, what tasks and futures need. One thread."""

    _ready: deque[asyncio.Handle]

    def run_rounds(self, num_rounds: int) -> bool:
        """In each, what was ready when it began, in order; whether there was anything."""
        ready = self._ready
        if not ready:
            return False
        _set_running_loop(self)
        try:
            for _ in range(num_rounds):
                for _ in range(len(ready)):
                    handle = ready.popleft()
                    if not handle.cancelled():
                        handle._run()
                if not ready:
                    break
        finally:
            _set_running_loop(None)
        return True

    def _write_to_self(self) -> None:
        """Nobody sleeps who is to be woken."""
