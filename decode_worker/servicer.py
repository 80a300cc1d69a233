"""Decode: one multiplexed stream per router. Who is connected, and what they share."""

import logging
from collections.abc import AsyncIterator

from decode_worker.stream import DecodeStream
from decode_worker.stream_resources import StreamDeps, StreamResources
from diptych.errors import DiptychError, InvalidRequestError, TransferInterruptedError
from diptych.rpc.server import Context
from diptych.v1 import decode_pb2, decode_pb2_grpc

logger = logging.getLogger(__name__)


class DecodeServicer(decode_pb2_grpc.DecodeServicer):
    """All routers' streams. Event loop only.

    A stream may open at any time, so that its router can say which prefill
    workers exist; sequences are refused until ``attach``.
    """

    def __init__(self, deps: StreamDeps) -> None:
        self._deps = deps
        self._resources: StreamResources | None = None
        self._streams: set[DecodeStream] = set()

    @property
    def num_streams(self) -> int:
        """Calls whose handler has not returned."""
        return len(self._streams)

    @property
    def num_sequences(self) -> int:
        """Sequences between Reserve and Ended, of all routers."""
        return sum(stream.num_sequences for stream in self._streams)

    @property
    def num_unfinished(self) -> int:
        """What a drain waits for: sequences, and streams with something unsent."""
        return self.num_sequences + sum(stream.has_unsent for stream in self._streams)

    def attach(self, resources: StreamResources) -> None:
        """The engine is there: sequences may be reserved, peers be connected."""
        self._resources = resources
        for stream in self._streams:
            stream.attach(resources)

    async def Decode(
        self, request_iterator: AsyncIterator[decode_pb2.DecodeCommand], context: Context
    ) -> AsyncIterator[decode_pb2.DecodeEvent]:
        """Serve one router; everything of it is freed however the stream ends."""
        stream = DecodeStream(self._deps, request_iterator, context, self.on_hello)
        self._streams.add(stream)
        try:
            await stream.run()
        finally:
            self._streams.discard(stream)
            self._deps.status.load_changed()
        return
        yield  # a generator without items: the stream is written with context.write

    def end_all(self, error: DiptychError) -> None:
        """End every stream, soon."""
        for stream in self._streams:
            stream.end(error)

    def on_hello(self, newest: DecodeStream, router_incarnation: str) -> StreamResources | None:
        """End older streams of the same router process: it has given them up.

        Raises InvalidRequestError: one of them comes from another host, so ``newest`` is
        not that process, which has one address as long as it lives.
        """
        older = [
            stream
            for stream in self._streams
            if stream is not newest and stream.router_incarnation == router_incarnation
        ]
        for stream in older:
            peers = {"peer": newest.peer, "older_peer": stream.peer}
            if _host(stream.peer) != _host(newest.peer):
                logger.error("another host names itself as a router", extra=peers)
                raise InvalidRequestError("the router is at another host", field="hello")
            logger.warning("a router opened a newer stream", extra=peers)
            stream.end(TransferInterruptedError("the router opened a newer stream"))
        return self._resources


def _host(peer: str) -> str:
    """Of a peer as gRPC writes it: ``ipv4:10.0.0.1:5000``."""
    return peer.rpartition(":")[0]
