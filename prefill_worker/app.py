"""Prefill worker process: puts engine, leases, KV source and gRPC together."""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from functools import partial

from diptych.errors import DiptychError
from diptych.process import Ready
from diptych.rpc.identity import Identity
from diptych.service_host import ServiceHost
from diptych.telemetry.families import LeaseMetrics
from diptych.v1 import (
    cache_pb2,
    cache_pb2_grpc,
    kv_source_pb2,
    kv_source_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from diptych.worker.cache_watch import CacheServicer
from diptych.worker.cores import confine_to
from diptych.worker.engine_parts import EngineParts
from diptych.worker.status import WatchServicer, WorkerStatus
from diptych.worker.step_metrics import StepMetrics
from diptych.worker.worker import WorkerLife
from kvtransfer.endpoint import TransferEndpoint
from kvtransfer.source.lease_table import LeaseTable
from kvtransfer.source.servicer import KVSourceServicer
from kvtransfer.testing.fault_service import FaultsServicer, serve_faults
from prefill_worker import source_metrics
from prefill_worker.config import PrefillWorkerConfig
from prefill_worker.kv_source_gate import KVSourceGate
from prefill_worker.servicer import PrefillServicer
from prefill_worker.stream_resources import StreamDeps, StreamResources

PREFILL = prefill_pb2.DESCRIPTOR.services_by_name["Prefill"].full_name
KV_SOURCE = kv_source_pb2.DESCRIPTOR.services_by_name["KVSource"].full_name
CACHE = cache_pb2.DESCRIPTOR.services_by_name["Cache"].full_name
WORKER = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name


class PrefillRole:
    """What makes a worker a prefill worker (see diptych.worker.worker.Role)."""

    def __init__(
        self,
        config: PrefillWorkerConfig,
        host: ServiceHost,
        status: WorkerStatus,
        servicer: PrefillServicer,
        gate: KVSourceGate,
        faults: FaultsServicer | None,
    ) -> None:
        self._config = config
        self._host = host
        self._status = status
        self._servicer = servicer
        self._gate = gate
        self._faults = faults  # of a worker that tests may break
        self._endpoint: TransferEndpoint | None = None

    @property
    def digest_level(self) -> str:
        return self._config.transfer.digest_level

    @property
    def num_scratch_blocks(self) -> int:
        return self._config.transfer.num_scratch_blocks

    @asynccontextmanager
    async def attached(self, parts: EngineParts, metrics: StepMetrics) -> AsyncIterator[None]:
        """Open the transfer endpoint and serve KVSource and leases."""
        leases = LeaseTable(parts.layout.block_size, parts.engine.generation)
        endpoint = self._endpoint = await TransferEndpoint.open(
            self._config.transfer,
            incarnation=self._status.incarnation,
            layout=parts.layout,
            memory=parts.memory,
            read_only=True,
        )
        try:
            source = KVSourceServicer(
                endpoint,
                leases,
                scratch=parts.scratch,
                timers=self._config.timers,
                progress=parts.progress,
                intercept=None if self._faults is None else self._faults.switch.context,
            )
            self._gate.source = source
            source_metrics.register(self._host.metrics, source.counters, leases)
            lease_metrics = LeaseMetrics(self._host.metrics, lambda: self._servicer.num_leases)
            self._servicer.attach(
                StreamResources(parts=parts, leases=leases, metrics=lease_metrics)
            )
            self._status.describe = partial(self._describe, parts)
            async with asyncio.TaskGroup() as tasks:
                running = []
                if self._faults is not None:
                    canaries = self._faults.attach(*parts.to_break())
                    running.append(tasks.create_task(canaries.run(), name="canaries"))
                yield
                for task in running:
                    task.cancel()
        finally:
            await endpoint.close()

    def _describe(self, parts: EngineParts, state: worker_pb2.WorkerState) -> None:
        parts.describe(state)
        state.faults_allowed = self._faults is not None

    def ready(self) -> bool:
        return True

    def transfer_stuck_s(self) -> float:
        return 0.0 if self._endpoint is None else self._endpoint.thread.stuck_s

    def unfinished_block_ids(self) -> Collection[int]:
        return ()

    def num_active(self) -> int:
        return self._servicer.num_leases

    def num_streams(self) -> int:
        return self._servicer.num_streams

    def end_all(self, error: DiptychError) -> None:
        self._servicer.end_all(error)


async def serve(config: PrefillWorkerConfig, stop: asyncio.Event, ready: Ready) -> None:
    """Serve until ``stop`` is set, then drain for ``timers.drain_s`` at the most."""
    if config.cpus is not None:
        confine_to(config.cpus)
    status = WorkerStatus(
        worker_pb2.WORKER_ROLE_PREFILL, zone=config.zone, nvlink_domain=config.nvlink_domain
    )
    identity = Identity.of(config.tls)
    async with ServiceHost(config, instance_id=status.incarnation, identity=identity) as host:
        servicer = PrefillServicer(
            StreamDeps(status=status, timers=config.timers, spans=host.tracing)
        )
        prefill_pb2_grpc.add_PrefillServicer_to_server(servicer, host.server)
        watch = WatchServicer(status, host.tracing)
        worker_pb2_grpc.add_WorkerServicer_to_server(watch, host.server)
        cache_pb2_grpc.add_CacheServicer_to_server(CacheServicer(status), host.server)
        gate = KVSourceGate()
        kv_source_pb2_grpc.add_KVSourceServicer_to_server(gate, host.server)
        faults = serve_faults(config.transfer, host.server, host.metrics)
        await host.start([PREFILL, KV_SOURCE, WORKER, CACHE])
        ready(host.port)
        role = PrefillRole(config, host, status, servicer, gate, faults)
        await WorkerLife(config, host, status, role).run(stop)
