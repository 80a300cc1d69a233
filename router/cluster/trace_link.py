"""Tells one worker which of its held traces are to be sent, and learns how its clock stands."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import grpc

from diptych.cancellation import pass_on_cancellation
from diptych.v1 import worker_pb2, worker_pb2_grpc
from router.cluster.watch import WorkerWatch
from router.cluster.worker_clock import ClockOffset, WorkerClock
from router.placement.views import WorkerId

logger = logging.getLogger(__name__)

_REST_S = 0.2  # words that come within this go together
_CLOCK_PERIOD_S = 10.0
_CALL_PATIENCE_S = 2.0
_MAX_WORDS = 8192  # that wait; a worker forgets what it hears nothing of


class _Word(NamedTuple):
    """What the process hears of one trace."""

    worker: WorkerId
    hold: int
    keep: bool


class TraceLink:
    """``run`` is its task; words are queued, never awaited, and lost with the process they are for.

    One that was not heard is said again, for as long as that process may be there: also when
    nothing was seen of it for a while. Event loop only.
    """

    def __init__(self, watch: WorkerWatch, now_s: Callable[[], float]) -> None:
        """``now_s`` is what our spans call now."""
        self._watch = watch
        self._now_s = now_s
        self._words: deque[_Word] = deque(maxlen=_MAX_WORDS)
        self._is_due = asyncio.Event()
        self._calling = asyncio.Lock()
        self._clock = WorkerClock()
        self._asked: WorkerId | None = None  # whose clock it is

    @property
    def clock_offset(self) -> ClockOffset | None:
        """Of the clock that the worker's spans go by; None while it is not known."""
        return self._clock.offset if self._asked == self._watch.worker else None

    def tell(self, worker: WorkerId, hold: int, *, keep: bool) -> None:
        """The trace that ``worker`` holds under ``hold`` is over, or sure to be kept."""
        self._words.append(_Word(worker, hold, keep))
        self._is_due.set()

    def worker_changed(self) -> None:
        """There is somebody, or nobody any more."""
        self._is_due.set()

    async def run(self) -> None:
        """Call the worker now and then, until cancelled."""
        rest_s = _REST_S
        while True:
            try:
                async with asyncio.timeout(_CLOCK_PERIOD_S):
                    await self._is_due.wait()
            except TimeoutError:
                pass
            await asyncio.sleep(rest_s)
            self._is_due.clear()
            async with self._calling:
                was_heard = await self._call()
            if was_heard:
                rest_s = _REST_S
            else:
                rest_s = min(2 * rest_s, _CLOCK_PERIOD_S)
                self._is_due.set()

    async def finish(self) -> None:
        """Say at once what was not heard, once more, within ``_CALL_PATIENCE_S``."""
        try:
            async with asyncio.timeout(_CALL_PATIENCE_S), self._calling:
                if self._words:
                    await self._call()
        except TimeoutError:
            pass
        worker = self._watch.worker
        if self._words and worker is not None:
            extra = {"worker": worker.address, "num_words": len(self._words)}
            logger.warning("a worker did not hear which traces to send", extra=extra)

    async def _call(self) -> bool:
        """False: the worker is there, as far as is known, and did not hear it."""
        worker = self._watch.worker
        if worker is None:
            return True
        if worker != self._asked:
            self._asked = worker
            self._clock.forget()
        words = [word for word in self._words if word.worker == worker]
        self._words.clear()
        was_heard = False
        try:
            was_heard = await self._say(words)
        finally:
            if not was_heard:
                self._words = deque((*words, *self._words), maxlen=_MAX_WORDS)
        return was_heard

    async def _say(self, words: Sequence[_Word]) -> bool:
        stub: worker_pb2_grpc.WorkerAsyncStub = worker_pb2_grpc.WorkerStub(self._watch.channel)
        request = worker_pb2.EndTracesRequest(
            keep=[word.hold for word in words if word.keep],
            drop=[word.hold for word in words if not word.keep],
        )
        asked_s = self._now_s()
        try:
            answer = await stub.EndTraces(request, timeout=_CALL_PATIENCE_S)
        except grpc.aio.AioRpcError as error:  # of a version without: then nothing is held there
            return error.code() is grpc.StatusCode.UNIMPLEMENTED
        except grpc.aio.UsageError:  # the channel is closed, there may be another
            return False
        except asyncio.CancelledError:  # or was closed meanwhile
            pass_on_cancellation()
            return False
        self._clock.told(asked_s, answer.time_s, self._now_s())
        return True
