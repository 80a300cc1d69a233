"""Ends a worker whose model thread does not come back from a step. Event loop only."""

import asyncio
import time
from collections.abc import Callable

from diptych.process import StuckThreadError
from diptych.rpc.liveness import Liveness
from diptych.timers import Timers
from diptych.v1 import common_pb2


class EngineStuckError(StuckThreadError):
    """A step never ends; the process must go down without its model thread."""


class EngineWatch:
    """Notices a step that is overdue, by the rule by which routers judge this worker.

    A step in flight cannot be broken off: it may write the KV pool for as long as it lasts.
    So the worker takes nothing new, gives up what it has and ends. Routers hear of a step
    some time after it began: the worker has FAILED before one of them calls it lost, and
    none finds it ready again. A process that was stopped as a whole does not blame its
    model thread.
    """

    def __init__(
        self,
        progress: Callable[[], common_pb2.EngineProgress],
        timers: Timers,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``progress()`` is what heartbeats tell of the engine."""
        self._progress = progress
        self._clock = clock
        self._liveness = Liveness(timers, clock())

    @property
    def turn_s(self) -> float:
        """How often to call ``check``, s."""
        return self._liveness.check_every_s

    async def run(self) -> None:
        """Watch until cancelled. Raises EngineStuckError."""
        while True:
            await asyncio.sleep(self.turn_s)
            self.check()

    def check(self) -> None:
        """Look once. Raises EngineStuckError."""
        self._liveness.heard(self._progress())
        problem = self._liveness.problem(self._clock())
        if problem is not None:
            raise EngineStuckError(f"the model thread is stuck: {problem}")
