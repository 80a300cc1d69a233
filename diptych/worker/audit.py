"""Watches that a worker's blocks add up; a leak is an alarm. Event loop only."""

import asyncio
import logging
from collections.abc import Callable, Collection

from diptych.engine.protocol import Engine
from diptych.telemetry.metrics import Metrics
from diptych.v1 import worker_pb2
from diptych.worker.status import WorkerStatus

logger = logging.getLogger(__name__)

_INTERVAL_S = 0.5


class BlockAudit:
    """Recounts the pool whenever the engine is idle.

    A mismatch is counted and logged, and the worker is FAILED from then on: it takes
    nothing new and its health check fails, while what runs may end.
    """

    def __init__(
        self,
        engine: Engine,
        status: WorkerStatus,
        metrics: Metrics,
        unfinished: Callable[[], Collection[int]],
    ) -> None:
        """``unfinished`` are the local blocks that reads without a pull may still write."""
        self._engine = engine
        self._status = status
        self._unfinished = unfinished
        self._known: str | None = None
        self._mismatches = metrics.counter(
            "kv_block_mismatches_total",
            "Times the pool's blocks were found to be held by nobody, or lost: an alarm.",
        )

    async def run(self) -> None:
        """Check twice a second, until cancelled."""
        while True:
            self.check()
            await asyncio.sleep(_INTERVAL_S)

    def check(self) -> None:
        """Compare now, if no step runs or waits."""
        load = self._engine.load()
        if load.num_running or load.num_waiting or self._engine.step_due:
            return
        mismatch = self._engine.mismatch(self._unfinished())
        if mismatch is None or mismatch == self._known:
            return
        self._known = mismatch
        self._mismatches.inc()
        logger.critical("KV blocks do not add up", extra={"mismatch": mismatch})
        self._status.set(worker_pb2.SERVING_STATE_FAILED, f"KV blocks do not add up: {mismatch}")
