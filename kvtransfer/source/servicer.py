"""KVSource: the gRPC shell around the leases of a source."""

import asyncio
from collections.abc import AsyncIterator, Callable

from diptych.errors import (
    DiptychError,
    InvalidRequestError,
    LayoutMismatchError,
    TransferInterruptedError,
)
from diptych.rpc.server import Context
from diptych.timers import Timers
from diptych.v1 import common_pb2, kv_source_pb2
from diptych.v1 import kv_source_pb2_grpc as pb_grpc
from kvtransfer.endpoint import REBUILD_WAIT_S, TransferEndpoint, compare_layouts
from kvtransfer.errors import TransportError
from kvtransfer.memory import ScratchBlocks
from kvtransfer.source.fetch_session import FetchSession, SourceCounters, SourceDeps
from kvtransfer.source.lease_table import LeaseTable
from kvtransfer.source.probe_blocks import ProbeBlocks
from kvtransfer.source.range_digests import RangeDigests
from kvtransfer.source.staged_blocks import SlotQueue
from kvtransfer.transports.base import Transport
from kvtransfer.transports.staged import StagedTransport
from kvtransfer.transports.ways import common_ways

_MAX_TRANSPORTS = 16  # that a reader may name


class KVSourceServicer(pb_grpc.KVSourceServicer):
    """Serves Connect and Fetch; add it to the worker's server.

    Computes digests of what ``leases`` announce, on the transfer thread.
    ``progress`` returns the engine's progress for heartbeats.
    """

    def __init__(
        self,
        endpoint: TransferEndpoint,
        leases: LeaseTable,
        *,
        scratch: ScratchBlocks,
        timers: Timers,
        progress: Callable[[], common_pb2.EngineProgress] | None = None,
        intercept: Callable[[Context, LeaseTable], Context] | None = None,
    ) -> None:
        """``intercept`` makes what a Fetch uses in the place of its context; none in service."""
        self.counters = SourceCounters()
        self._endpoint = endpoint
        self._leases = leases
        self._intercept = intercept
        self._deps = SourceDeps(
            endpoint,
            leases,
            ProbeBlocks(scratch),
            timers,
            self.counters,
            progress or common_pb2.EngineProgress,
            _staging(endpoint),
        )
        patience_s = timers.lost_peer_s  # a reader's, for its answer
        self._rebuild_wait_s = min(REBUILD_WAIT_S, patience_s / 4)
        self._connect_wait_s = patience_s / 2  # all such waits of one Connect
        leases.observe(RangeDigests(endpoint, leases, self.counters).take)

    async def Connect(
        self,
        request: kv_source_pb2.ConnectRequest,
        context: Context,
    ) -> kv_source_pb2.ConnectResponse:
        """Compare layouts; tell how to reach our memory over the first common transport."""
        endpoint = self._endpoint
        until_s = asyncio.get_running_loop().time() + self._connect_wait_s
        try:
            transport = await self._common_transport(request, until_s)
            memory = await self._descriptor(transport, until_s)
        except DiptychError as error:
            self.counters.num_refused[error.reason] += 1
            raise
        return kv_source_pb2.ConnectResponse(
            source_incarnation=endpoint.incarnation,
            layout=endpoint.layout,
            transport=transport.name,
            memory=memory,
            pool=endpoint.pool,
        )

    async def Fetch(
        self,
        request_iterator: AsyncIterator[kv_source_pb2.FetchCommand],
        context: Context,
    ) -> AsyncIterator[kv_source_pb2.FetchEvent]:
        """One pull or one probe; yields nothing (it writes from a task group)."""
        if self._intercept is not None:
            context = self._intercept(context, self._leases)
        session = FetchSession(self._deps, context)
        try:
            await self._serve(session)
        except DiptychError as error:
            self.counters.num_refused[error.reason] += 1
            await session.tell(error)
            raise
        await session.let_out()
        return
        yield

    async def _serve(self, session: FetchSession) -> None:
        self.counters.num_fetches_open += 1
        try:
            with self._endpoint.serving():
                await session.run()
        finally:
            self.counters.num_fetches_open -= 1

    async def _common_transport(
        self, request: kv_source_pb2.ConnectRequest, until_s: float
    ) -> Transport:
        """The first that both have, that is ready, and by which there is a way.

        Given that the layouts agree.
        """
        ours = self._endpoint.transports
        if len(request.transports) > _MAX_TRANSPORTS:
            raise InvalidRequestError(
                f"{len(request.transports)} are named, more than {_MAX_TRANSPORTS}",
                field="transports",
            )
        compare_layouts(request.layout, self._endpoint.layout)
        common = [name for name in request.transports if name in ours]
        if not common:
            raise LayoutMismatchError(
                f"transports: the reader has {list(request.transports)}, the source has "
                f"{list(ours)}",
                field="transports",
            )
        possible, refused = common_ways(common, self._endpoint.pool, request.pool)
        if not possible:
            raise LayoutMismatchError(f"transports: {'; '.join(refused)}", field="transports")
        for name in possible:
            if await self._until_ready(ours[name], until_s):
                break
        return ours[name]

    async def _descriptor(
        self, transport: Transport, until_s: float
    ) -> kv_source_pb2.MemoryDescriptor | None:
        """Of its agent; of the next one where that ends at this moment."""
        for is_last in (False, True):
            try:
                return await self._endpoint.thread.call(transport.descriptor)
            except TransportError as error:  # being rebuilt
                interrupted = TransferInterruptedError(str(error))
            if is_last or not await self._until_ready(transport, until_s):
                break
        raise interrupted

    async def _until_ready(self, transport: Transport, until_s: float) -> bool:
        """Wait a moment while it is rebuilt; not beyond ``until_s`` by the loop's clock."""
        left_s = until_s - asyncio.get_running_loop().time()
        wait_s = max(0.0, min(self._rebuild_wait_s, left_s))
        return await self._endpoint.until_ready(transport, wait_s)


def _staging(endpoint: TransferEndpoint) -> SlotQueue | None:
    transport = endpoint.transports.get("staged")
    stage = transport.stage if isinstance(transport, StagedTransport) else None
    return None if stage is None else SlotQueue(stage)
