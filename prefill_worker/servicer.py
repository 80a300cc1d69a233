"""Prefill: one stream per lease."""

from collections.abc import AsyncIterator, Sequence

from diptych.engine.scheduling.sequence import SequenceKey
from diptych.engine.scheduling.step import SequenceUpdate
from diptych.errors import DiptychError, InvalidRequestError
from diptych.rpc.server import Context
from diptych.v1 import prefill_pb2, prefill_pb2_grpc
from prefill_worker.stream import LeaseStream
from prefill_worker.stream_resources import StreamDeps, StreamResources


class PrefillServicer(prefill_pb2_grpc.PrefillServicer):
    """All leases of this worker. Event loop only.

    A stream may open at any time; its lease is refused until ``attach``.
    """

    def __init__(self, deps: StreamDeps) -> None:
        self._deps = deps
        self._resources: StreamResources | None = None
        self._streams: set[LeaseStream] = set()
        self._leases: dict[SequenceKey, LeaseStream] = {}  # those that were started

    def attach(self, resources: StreamResources) -> None:
        """The engine is there: leases may be opened."""
        self._resources = resources
        for stream in self._streams:
            stream.attach(resources)
        resources.parts.engine.subscribe(self._on_step)

    @property
    def num_leases(self) -> int:
        """Leases that hold blocks."""
        return len(self._leases)

    @property
    def num_streams(self) -> int:
        """Calls whose handler has not returned."""
        return len(self._streams)

    async def Prefill(
        self, request_iterator: AsyncIterator[prefill_pb2.PrefillCommand], context: Context
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        """Serve one lease; its blocks are freed however the stream ends."""
        stream = LeaseStream(self._deps, request_iterator, context, self._on_start)
        self._streams.add(stream)
        if self._resources is not None:
            stream.attach(self._resources)
        try:
            await self._run(stream)
        except DiptychError as error:
            await stream.tell(error)
            raise
        finally:
            self._streams.discard(stream)
            self._deps.status.load_changed()
        return
        yield  # a generator without items: the stream is written with context.write

    def end_all(self, error: DiptychError) -> None:
        """End every lease, soon."""
        for stream in self._leases.values():
            stream.end(error)

    async def _run(self, stream: LeaseStream) -> None:
        """Until the stream has freed everything; its key is forgotten then."""
        try:
            await stream.run()
        finally:
            if stream.key is not None:
                del self._leases[stream.key]

    def _on_start(self, key: SequenceKey, stream: LeaseStream) -> None:
        """A lease is about to be opened. Raises InvalidRequestError: the id is in use."""
        if key in self._leases:
            raise InvalidRequestError(f"{key.sequence_id} is in use", field="start.sequence_id")
        self._leases[key] = stream

    def _on_step(self, updates: Sequence[SequenceUpdate]) -> None:
        """Tell each lease what a step did to its sequence."""
        for update in updates:
            stream = self._leases.get(update.sequence.key)
            if stream is not None:
                stream.on_update(update)
