"""KVSource before and after the engine is loaded: gRPC wants services before it starts."""

from collections.abc import AsyncIterator

from diptych.rpc.server import Context
from diptych.v1 import kv_source_pb2, kv_source_pb2_grpc
from diptych.worker.status import still_loading
from kvtransfer.source.servicer import KVSourceServicer


class KVSourceGate(kv_source_pb2_grpc.KVSourceServicer):
    """Refuses readers until ``source`` is set, then passes every call on to it."""

    def __init__(self) -> None:
        self.source: KVSourceServicer | None = None

    async def Connect(
        self, request: kv_source_pb2.ConnectRequest, context: Context
    ) -> kv_source_pb2.ConnectResponse:
        """See kvtransfer.source.servicer."""
        return await self._opened().Connect(request, context)

    async def Fetch(
        self, request_iterator: AsyncIterator[kv_source_pb2.FetchCommand], context: Context
    ) -> AsyncIterator[kv_source_pb2.FetchEvent]:
        """See kvtransfer.source.servicer."""
        async for event in self._opened().Fetch(request_iterator, context):
            yield event

    def _opened(self) -> KVSourceServicer:
        if self.source is None:
            raise still_loading()
        return self.source
