"""Notices that a client takes nothing for too long. No cost per response but two assignments."""

import asyncio
import math
from collections.abc import Callable


def _nobody() -> None:
    """Stands for who was told while it watched."""


class WriteWatch:
    """Bounds how long one response may wait for its client.

    One timer per ``patience_s`` looks at when the response that is being written was
    begun, so that a response costs no timer of its own. Event loop only; ``close`` it.
    """

    def __init__(
        self,
        patience_s: float,
        on_stuck: Callable[[], None],
        taken_s: Callable[[], float] = lambda: -math.inf,
    ) -> None:
        """``on_stuck`` is called once, after ``patience_s`` or a little later.

        ``taken_s``: when the client last took a part of a response, on the loop's clock. It has
        ``patience_s`` for each part.
        """
        self._patience_s = patience_s
        self._taken_s = taken_s
        self._on_stuck = on_stuck
        self._loop = asyncio.get_running_loop()
        self._began_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_writing(self) -> bool:
        """Whether a response waits for its client."""
        return self._began_s is not None

    def begin(self) -> None:
        """A response was handed out."""
        self._began_s = self._loop.time()
        if self._timer is None:
            self._arm(self._began_s)

    def end(self) -> None:
        """It was written."""
        self._began_s = None

    def close(self) -> None:
        """Watch no more, and know no more of who would be told."""
        self._began_s = None
        self._on_stuck = _nobody
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self, since_s: float) -> None:
        self._timer = self._loop.call_at(since_s + self._patience_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._began_s is None:
            return
        since_s = max(self._began_s, self._taken_s())
        if self._loop.time() >= since_s + self._patience_s:
            self._on_stuck()
        else:
            self._arm(since_s)
