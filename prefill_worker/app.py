"""The prefill role: leases and KVSource around an engine; and the worker that has it alone."""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from functools import partial

import grpc

from diptych.errors import DiptychError
from diptych.process import Ready
from diptych.service_host import ServiceHost
from diptych.telemetry.families import LeaseMetrics
from diptych.v1 import (
    kv_source_pb2,
    kv_source_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_pb2,
)
from diptych.worker.config import WorkerConfig
from diptych.worker.role import RoleParts
from diptych.worker.roles import serve_roles
from diptych.worker.status import WorkerStatus
from kvtransfer.source.lease_table import LeaseTable
from kvtransfer.source.servicer import KVSourceServicer
from prefill_worker import source_metrics
from prefill_worker.config import PrefillWorkerConfig
from prefill_worker.kv_source_gate import KVSourceGate
from prefill_worker.servicer import PrefillServicer
from prefill_worker.stream_resources import StreamDeps, StreamResources

PREFILL = prefill_pb2.DESCRIPTOR.services_by_name["Prefill"].full_name
KV_SOURCE = kv_source_pb2.DESCRIPTOR.services_by_name["KVSource"].full_name


class PrefillRole:
    """What makes a worker a prefill worker (see diptych.worker.role.Role)."""

    role = worker_pb2.WORKER_ROLE_PREFILL
    services = (PREFILL, KV_SOURCE)

    def __init__(self, config: WorkerConfig, host: ServiceHost, status: WorkerStatus) -> None:
        self._config = config
        self._host = host
        self._servicer = PrefillServicer(
            StreamDeps(status=status, timers=config.timers, spans=host.tracing)
        )
        self._gate = KVSourceGate()

    def add_to(self, server: grpc.aio.Server) -> None:
        """See :class:`diptych.worker.role.Role`."""
        prefill_pb2_grpc.add_PrefillServicer_to_server(self._servicer, server)
        kv_source_pb2_grpc.add_KVSourceServicer_to_server(self._gate, server)

    @asynccontextmanager
    async def attached(self, shared: RoleParts) -> AsyncIterator[None]:
        """Serve KVSource and leases."""
        parts = shared.parts
        leases = LeaseTable(parts.layout.block_size, parts.engine.generation)
        source = KVSourceServicer(
            shared.endpoint,
            leases,
            scratch=shared.scratch,
            timers=self._config.timers,
            progress=parts.progress,
            intercept=shared.fetches,
        )
        self._gate.source = source
        source_metrics.register(self._host.metrics, source.counters, leases)
        metrics = LeaseMetrics(self._host.metrics, lambda: self._servicer.num_leases)
        self._servicer.attach(StreamResources(parts=parts, leases=leases, metrics=metrics))
        yield

    def describe(self, state: worker_pb2.WorkerState) -> None:
        """See :class:`diptych.worker.role.Role`. There is nothing but what every worker tells."""

    def ready(self) -> bool:
        """See :class:`diptych.worker.role.Role`."""
        return True

    def unfinished_block_ids(self) -> Collection[int]:
        """See :class:`diptych.worker.role.Role`. Nothing is read into its blocks."""
        return ()

    def num_active(self) -> int:
        """See :class:`diptych.worker.role.Role`."""
        return self._servicer.num_leases

    def num_streams(self) -> int:
        """See :class:`diptych.worker.role.Role`."""
        return self._servicer.num_streams

    def end_all(self, error: DiptychError) -> None:
        """See :class:`diptych.worker.role.Role`."""
        self._servicer.end_all(error)


async def serve(config: PrefillWorkerConfig, stop: asyncio.Event, ready: Ready) -> None:
    """Serve until ``stop`` is set, then drain for ``timers.drain_s`` at the most."""
    makers = {worker_pb2.WORKER_ROLE_PREFILL: partial(PrefillRole, config)}
    await serve_roles(config, makers, stop, ready)
