"""Decode worker process: puts engine, pairs and gRPC together."""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from decode_worker import pair_metrics
from decode_worker.config import DecodeWorkerConfig
from decode_worker.observer import outcome_names
from decode_worker.servicer import DecodeServicer
from decode_worker.stream_resources import StreamDeps, StreamResources
from decode_worker.worker_limits import WorkerLimits
from diptych.errors import DiptychError
from diptych.process import Ready
from diptych.rpc.identity import Identity
from diptych.rpc.peer_channel import Dialer
from diptych.service_host import ServiceHost
from diptych.telemetry.families import TransferMetrics
from diptych.v1 import (
    cache_pb2,
    cache_pb2_grpc,
    decode_pb2,
    decode_pb2_grpc,
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
from kvtransfer.reader.pairs import PairTable
from kvtransfer.testing.fault_service import FaultsServicer, serve_faults

DECODE = decode_pb2.DESCRIPTOR.services_by_name["Decode"].full_name
CACHE = cache_pb2.DESCRIPTOR.services_by_name["Cache"].full_name
WORKER = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name


class DecodeRole:
    """What makes a worker a decode worker (see diptych.worker.worker.Role)."""

    def __init__(
        self,
        config: DecodeWorkerConfig,
        host: ServiceHost,
        status: WorkerStatus,
        servicer: DecodeServicer,
        faults: FaultsServicer | None,
    ) -> None:
        self._config = config
        self._host = host
        self._status = status
        self._servicer = servicer
        self._faults = faults  # of a worker that tests may break
        self._endpoint: TransferEndpoint | None = None
        self._pairs: PairTable | None = None
        self._told_pairs: list[worker_pb2.Pair] = []  # the last on Watch
        self._pairs_version = 0

    @property
    def digest_level(self) -> str:
        return self._config.transfer.digest_level

    @property
    def num_scratch_blocks(self) -> int:
        return self._config.transfer.num_scratch_blocks

    @asynccontextmanager
    async def attached(self, parts: EngineParts, metrics: StepMetrics) -> AsyncIterator[None]:
        """Open the transfer endpoint, keep the pairs connected, serve sequences."""
        endpoint = self._endpoint = await TransferEndpoint.open(
            self._config.transfer,
            incarnation=self._status.incarnation,
            layout=parts.layout,
            memory=parts.memory,
        )
        pairs = PairTable(
            endpoint,
            scratch=parts.scratch,
            dialer=Dialer(self._config.timers, self._host.identity),
            on_change=self._status.changed,
            on_quarantine=parts.engine.quarantine,
            on_quarantine_end=parts.engine.end_quarantine,
            interceptor=None if self._faults is None else self._faults.switch,
        )
        self._pairs = pairs
        pair_metrics.register(self._host.metrics, pairs)
        self._status.describe = lambda state: self._describe(parts, pairs, state)
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(pairs.run(), name="pairs")]
                if self._faults is not None:
                    canaries = self._faults.attach(*parts.to_break())
                    running.append(tasks.create_task(canaries.run(), name="canaries"))
                self._servicer.attach(self._resources(parts, pairs, metrics))
                yield
                for task in running:
                    task.cancel()
        finally:
            await endpoint.close()

    def ready(self) -> bool:
        """Whether it can serve anything: by a proven pair, or by itself."""
        if self._config.local_prefill:
            return True
        pairs = [] if self._pairs is None else self._pairs.pairs()
        return any(pair.state == worker_pb2.PAIR_STATE_PROVEN for pair in pairs)

    def transfer_stuck_s(self) -> float:
        return 0.0 if self._endpoint is None else self._endpoint.thread.stuck_s

    def unfinished_block_ids(self) -> Collection[int]:
        return () if self._pairs is None else self._pairs.quarantined_block_ids

    def num_active(self) -> int:
        return self._servicer.num_unfinished

    def num_streams(self) -> int:
        return self._servicer.num_streams

    def end_all(self, error: DiptychError) -> None:
        self._servicer.end_all(error)

    def _resources(
        self, parts: EngineParts, pairs: PairTable, metrics: StepMetrics
    ) -> StreamResources:
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
            engine_metrics=metrics.engine,
            transfer_metrics=TransferMetrics(
                self._host.metrics, self._config.transfer.transports, outcome_names()
            ),
        )

    def _describe(
        self, parts: EngineParts, pairs: PairTable, state: worker_pb2.WorkerState
    ) -> None:
        parts.describe(state)
        told = pairs.pairs()
        if told != self._told_pairs:
            self._told_pairs, self._pairs_version = told, self._pairs_version + 1
        state.pairs.extend(told)
        state.pairs_version = self._pairs_version
        state.local_prefill = self._config.local_prefill
        state.faults_allowed = self._faults is not None


async def serve(config: DecodeWorkerConfig, stop: asyncio.Event, ready: Ready) -> None:
    """Serve until ``stop`` is set, then drain for ``timers.drain_s`` at the most."""
    if config.cpus is not None:
        confine_to(config.cpus)
    status = WorkerStatus(
        worker_pb2.WORKER_ROLE_DECODE, zone=config.zone, nvlink_domain=config.nvlink_domain
    )
    identity = Identity.of(config.tls)
    async with ServiceHost(config, instance_id=status.incarnation, identity=identity) as host:
        deps = StreamDeps(
            status=status,
            timers=config.timers,
            spans=host.tracing,
            max_unsent_events=config.max_unsent_events,
        )
        servicer = DecodeServicer(deps)
        decode_pb2_grpc.add_DecodeServicer_to_server(servicer, host.server)
        watch = WatchServicer(status, host.tracing)
        worker_pb2_grpc.add_WorkerServicer_to_server(watch, host.server)
        cache_pb2_grpc.add_CacheServicer_to_server(CacheServicer(status), host.server)
        faults = serve_faults(config.transfer, host.server, host.metrics)
        await host.start([DECODE, WORKER, CACHE])
        ready(host.port)
        role = DecodeRole(config, host, status, servicer, faults)
        await WorkerLife(config, host, status, role).run(stop)
