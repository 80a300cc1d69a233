"""Tells routers what the engine's prefix cache holds. Event loop only."""

import asyncio
import logging
from collections.abc import AsyncIterator

from diptych.errors import NotServedError
from diptych.rpc.server import Context
from diptych.v1 import cache_pb2, cache_pb2_grpc
from diptych.worker.status import WorkerStatus, still_loading

logger = logging.getLogger(__name__)

# Between two changes that one router is told of, s; and how many such gaps at the most.
_GAP_S = 0.25
_MOST_GAPS = 4


class CacheServicer(cache_pb2_grpc.CacheServicer):
    """Cache: WatchCache tells what became other, at least each second, to the end of the process.

    A router that takes its messages slowly is told of more at once, never of more than all.
    """

    def __init__(self, status: WorkerStatus) -> None:
        self._status = status

    async def WatchCache(
        self, request: cache_pb2.WatchCacheRequest, context: Context
    ) -> AsyncIterator[cache_pb2.CacheChange]:
        """Stream changes until the router goes or the process ends."""
        status, log = self._status, self._status.cache_log
        if not status.loaded:
            raise still_loading()
        if log is None:
            raise NotServedError("this worker's engine does not tell what it has cached")
        logger.debug("cache watched", extra={"router_incarnation": request.router_incarnation})
        is_resumed = request.incarnation == status.incarnation
        seq = request.seq if is_resumed else None
        while True:
            for change in log.since(seq):
                yield change.to_proto(status.incarnation)
                seq = change.to_seq
            for _ in range(_MOST_GAPS):
                await asyncio.sleep(_GAP_S)
                if log.seq != seq:
                    break
