"""Tells one worker which of its held traces are to be sent, and learns how its clock stands."""

import asyncio
from collections import deque
from collections.abc import Callable

import grpc

from diptych.v1 import worker_pb2, worker_pb2_grpc
from router.cluster.watch import WorkerWatch
from router.cluster.worker_clock import ClockOffset, WorkerClock
from router.placement.types import WorkerId

_REST_S = 0.2  # words that come within this go together
_CLOCK_PERIOD_S = 10.0
_CALL_PATIENCE_S = 2.0
_MAX_WORDS = 8192  # that wait; a worker forgets what it hears nothing of


class TraceLink:
    """``run`` is its task; words are queued, never awaited, and lost with the worker.

    Event loop only.
    """

    def __init__(self, watch: WorkerWatch, now_s: Callable[[], float]) -> None:
        """``now_s`` is what our spans call now."""
        self._watch = watch
        self._now_s = now_s
        self._words: deque[tuple[int, bool]] = deque(maxlen=_MAX_WORDS)
        self._is_due = asyncio.Event()
        self._clock = WorkerClock()
        self._asked: WorkerId | None = None  # whose clock it is

    @property
    def clock_offset(self) -> ClockOffset | None:
        """Of the clock that the worker's spans go by; None while it is not known."""
        return self._clock.offset if self._asked == self._watch.worker else None

    def tell(self, hold: int, *, keep: bool) -> None:
        """The trace that is held under ``hold`` is over."""
        self._words.append((hold, keep))
        self._is_due.set()

    def worker_changed(self) -> None:
        """There is somebody, or nobody any more."""
        self._is_due.set()

    async def run(self) -> None:
        """Call the worker now and then, until cancelled."""
        while True:
            try:
                async with asyncio.timeout(_CLOCK_PERIOD_S):
                    await self._is_due.wait()
            except TimeoutError:
                pass
            await asyncio.sleep(_REST_S)
            self._is_due.clear()
            await self._call()

    async def _call(self) -> None:
        words, worker = list(self._words), self._watch.worker
        self._words.clear()
        if worker is None:
            return
        if worker != self._asked:
            self._asked = worker
            self._clock.forget()
        stub: worker_pb2_grpc.WorkerAsyncStub = worker_pb2_grpc.WorkerStub(self._watch.channel)
        request = worker_pb2.EndTracesRequest(
            keep=[hold for hold, keep in words if keep],
            drop=[hold for hold, keep in words if not keep],
        )
        asked_s = self._now_s()
        try:
            answer = await stub.EndTraces(request, timeout=_CALL_PATIENCE_S)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError):
            return  # it is gone, or of a version without: then nothing is held there
        if self._asked == worker:
            self._clock.told(asked_s, answer.time_s, self._now_s())
