"""The decode role: pairs and sequences around an engine; and the worker that has it alone."""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from functools import partial

import grpc

from decode_worker import pair_metrics
from decode_worker.config import DecodeWorkerConfig
from decode_worker.observer import outcome_names
from decode_worker.servicer import DecodeServicer
from decode_worker.stream_resources import StreamDeps, StreamResources
from decode_worker.worker_limits import WorkerLimits
from diptych.errors import DiptychError
from diptych.process import Ready
from diptych.rpc.peer_channel import Dialer
from diptych.service_host import ServiceHost
from diptych.telemetry.families import TransferMetrics
from diptych.v1 import decode_pb2, decode_pb2_grpc, worker_pb2
from diptych.worker.role import RoleParts
from diptych.worker.roles import serve_roles
from diptych.worker.status import WorkerStatus
from kvtransfer.reader.pairs import PairTable

DECODE = decode_pb2.DESCRIPTOR.services_by_name["Decode"].full_name


class DecodeRole:
    """What makes a worker a decode worker (see diptych.worker.role.Role)."""

    role = worker_pb2.WORKER_ROLE_DECODE
    services = (DECODE,)

    def __init__(self, config: DecodeWorkerConfig, host: ServiceHost, status: WorkerStatus) -> None:
        self._config = config
        self._host = host
        self._status = status
        self._servicer = DecodeServicer(
            StreamDeps(
                status=status,
                timers=config.timers,
                spans=host.tracing,
                max_unsent_events=config.max_unsent_events,
            )
        )
        self._pairs: PairTable | None = None
        self._told_pairs: list[worker_pb2.Pair] = []  # the last on Watch
        self._pairs_version = 0

    def add_to(self, server: grpc.aio.Server) -> None:
        """See :class:`diptych.worker.role.Role`."""
        decode_pb2_grpc.add_DecodeServicer_to_server(self._servicer, server)

    @asynccontextmanager
    async def attached(self, shared: RoleParts) -> AsyncIterator[None]:
        """Keep the pairs connected, serve sequences."""
        engine = shared.parts.engine
        pairs = self._pairs = PairTable(
            shared.endpoint,
            scratch=shared.scratch,
            dialer=Dialer(self._config.timers, self._host.identity),
            on_change=self._status.changed,
            on_quarantine=engine.quarantine,
            on_quarantine_end=engine.end_quarantine,
            interceptor=shared.links,
        )
        pair_metrics.register(self._host.metrics, pairs)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(pairs.run(), name="pairs")
            self._servicer.attach(self._resources(shared, pairs))
            yield
            running.cancel()

    def describe(self, state: worker_pb2.WorkerState) -> None:
        """See :class:`diptych.worker.role.Role`."""
        told = [] if self._pairs is None else self._pairs.pairs()
        if told != self._told_pairs:
            self._told_pairs, self._pairs_version = told, self._pairs_version + 1
        state.pairs.extend(told)
        state.pairs_version = self._pairs_version
        state.local_prefill = self._config.local_prefill

    def ready(self) -> bool:
        """Whether it can serve anything: by a proven pair, or by itself."""
        if self._config.local_prefill:
            return True
        pairs = [] if self._pairs is None else self._pairs.pairs()
        return any(pair.state == worker_pb2.PAIR_STATE_PROVEN for pair in pairs)

    def unfinished_block_ids(self) -> Collection[int]:
        """See :class:`diptych.worker.role.Role`."""
        return () if self._pairs is None else self._pairs.quarantined_block_ids

    def num_active(self) -> int:
        """See :class:`diptych.worker.role.Role`."""
        return self._servicer.num_unfinished

    def num_streams(self) -> int:
        """See :class:`diptych.worker.role.Role`."""
        return self._servicer.num_streams

    def end_all(self, error: DiptychError) -> None:
        """See :class:`diptych.worker.role.Role`."""
        self._servicer.end_all(error)

    def _resources(self, shared: RoleParts, pairs: PairTable) -> StreamResources:
        parts = shared.parts
        limits = WorkerLimits(
            vocab_size=parts.vocab_size,
            max_model_len=parts.max_model_len,
            block_size=parts.layout.block_size,
            local_prefill=self._config.local_prefill,
        )
        return StreamResources(
            parts=parts,
            pairs=pairs,
            limits=limits,
            engine_metrics=shared.metrics.engine,
            transfer_metrics=TransferMetrics(
                self._host.metrics, self._config.transfer.transports, outcome_names()
            ),
        )


async def serve(config: DecodeWorkerConfig, stop: asyncio.Event, ready: Ready) -> None:
    """Serve until ``stop`` is set, then drain for ``timers.drain_s`` at the most."""
    makers = {worker_pb2.WORKER_ROLE_DECODE: partial(DecodeRole, config)}
    await serve_roles(config, makers, stop, ready)
