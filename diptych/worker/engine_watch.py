"""Ends a worker whose model thread does not come back from a step. Event loop only."""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from diptych.process import StuckThreadError
from diptych.timers import Timers


class EngineStuckError(StuckThreadError):
    """A step never ends; the process must go down without its model thread."""


class StepProgress(Protocol):
    """What an engine tells of its steps."""

    @property
    def num_steps(self) -> int: ...

    @property
    def step_due(self) -> bool: ...

    @property
    def predicted_step_s(self) -> float: ...


class EngineWatch:
    """Notices a step that is overdue.

    A step in flight cannot be broken off: it may write the KV pool for as long as it
    lasts. So the worker takes nothing new, gives up what it has and ends. What a step may
    last is what routers allow it too: ``lost_peer_s`` and twice its prediction (unknown:
    twice ``lost_peer_s``). Routers hear of a step some time after it began, so the worker
    is FAILED before any of them calls it lost and finds it ready again.

    Time is counted in turns of the watch, each worth two at the most: a process that was
    stopped as a whole, or whose event loop was held up, does not blame its model thread.
    """

    def __init__(
        self,
        engine: StepProgress,
        timers: Timers,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._timers = timers
        self._clock = clock
        self._checked_at = clock()
        self._num_steps = engine.num_steps
        self._stalled_s = 0.0

    @property
    def turn_s(self) -> float:
        """How often to call ``check``, s."""
        return self._timers.heartbeat_s / 4

    async def run(self) -> None:
        """Watch until cancelled. Raises EngineStuckError."""
        while True:
            await asyncio.sleep(self.turn_s)
            self.check()

    def check(self) -> None:
        """Look once. Raises EngineStuckError."""
        now, engine = self._clock(), self._engine
        turn_s = min(now - self._checked_at, 2 * self.turn_s)
        self._checked_at = now
        if not engine.step_due or engine.num_steps != self._num_steps:
            self._num_steps, self._stalled_s = engine.num_steps, 0.0
            return
        self._stalled_s += turn_s
        patience_s = self._timers.lost_peer_s
        if self._stalled_s >= patience_s + (2 * engine.predicted_step_s or patience_s):
            raise EngineStuckError(f"the model thread is at one step for {self._stalled_s:.1f} s")
