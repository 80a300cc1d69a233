"""Keeps what one worker's prefix cache holds known: the stream on which it tells."""

import asyncio
import logging

import grpc

from diptych.cache_change import CacheChange
from diptych.errors import DiptychError, NoWorkerError
from diptych.rpc.client_stream import ClientStream, keep_open
from diptych.timers import Timers
from diptych.v1 import cache_pb2, cache_pb2_grpc
from router.cluster.watch import WorkerWatch
from router.placement.cache_index import CacheIndex
from router.placement.views import WorkerId

logger = logging.getLogger(__name__)

# A worker of an earlier version has no such call, and if it is locked, lets nobody call it.
_MUTE = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.PERMISSION_DENIED)


class CacheLink:
    """Holds the stream while the worker serves, and follows it in ``index``.

    A stream that broke is taken up where it ended. If it cannot be, or if what came is not what
    the worker says that it has, nothing is believed until it has told everything anew. A process
    that does not tell of its cache is asked once, and again after it was lost. Event loop only;
    ``run`` is its task.
    """

    def __init__(
        self, watch: WorkerWatch, index: CacheIndex, *, router_incarnation: str, timers: Timers
    ) -> None:
        self._watch = watch
        self._index = index
        self._router_incarnation = router_incarnation
        self._timers = timers
        self._mute: WorkerId | None = None
        self._too_large: WorkerId | None = None  # whose cache the index has no room for
        self._is_closed = False
        self._has_told = False  # something that fits, on the stream that is open
        self._may_ask = asyncio.Event()
        self.worker_changed()

    def worker_changed(self) -> None:
        """The watch says something new of who is there."""
        if not self._watch.is_serving:
            self._mute = None  # what locked it may be other when it is back
        if self._watch.is_serving and self._watch.worker != self._mute and not self._is_closed:
            self._may_ask.set()
        else:
            self._may_ask.clear()

    def close(self) -> None:
        """The worker was left and is forgotten: nothing that it still says is followed."""
        self._is_closed = True
        self._may_ask.clear()

    async def run(self) -> None:
        """Hold a stream whenever the worker serves, until cancelled."""
        await keep_open(self._hold_stream)

    async def _hold_stream(self) -> bool:
        """Run one stream to its end; True if the next one may be opened soon."""
        await self._may_ask.wait()
        worker = self._watch.worker
        if worker is None:  # it went before this task had its turn
            return False
        seq = self._index.seq(worker.incarnation)
        request = cache_pb2.WatchCacheRequest(router_incarnation=self._router_incarnation)
        if seq is not None:
            request.incarnation, request.seq = worker.incarnation, seq
        self._has_told = False
        call = cache_pb2_grpc.CacheStub(self._watch.channel).WatchCache(request)
        stream = ClientStream(call, self._timers, progress=lambda told: None)
        ended = await stream.run(lambda told: self._take(worker, told))
        if not self._has_told:
            self._index.untold(worker.incarnation)
        if ended.code in _MUTE and self._watch.worker == worker:
            self._mute = worker
            self.worker_changed()
            extra = {"worker": worker.address, "why": ended.message}
            logger.warning("worker does not tell what it has cached", extra=extra)
        return self._has_told

    def _take(self, worker: WorkerId, told: cache_pb2.CacheChange) -> DiptychError | None:
        """Follow what came; an error ends the stream."""
        if self._is_closed:
            return NoWorkerError("the worker was left")
        if self._watch.worker != worker or told.incarnation != worker.incarnation:
            self._has_told = False
            return NoWorkerError("another process is there")
        try:
            fits = self._index.told(worker.incarnation, CacheChange.from_proto(told))
        except ValueError as error:
            fits = False
            logger.warning("what a worker told of its cache is none", extra={"why": str(error)})
        self._has_told = fits
        if fits:
            self._say_if_too_large(worker)
            return None
        logger.warning("a worker's cache was lost track of", extra={"worker": worker.address})
        return NoWorkerError("what it told of its cache is not what it has")

    def _say_if_too_large(self, worker: WorkerId) -> None:
        if worker != self._too_large and not self._index.is_whole(worker.incarnation):
            self._too_large = worker
            extra = {"worker": worker.address, "field": "prefix_memory_blocks"}
            logger.warning("a worker has more cached than is known here", extra=extra)
