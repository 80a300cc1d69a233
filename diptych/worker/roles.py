"""A worker's process: its roles, put together around one engine and one pool."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from diptych.errors import DiptychError
from diptych.process import Ready
from diptych.rpc.identity import Identity
from diptych.service_host import ServiceHost
from diptych.v1 import cache_pb2, cache_pb2_grpc, worker_pb2, worker_pb2_grpc
from diptych.wire_names import ROLE_NAMES
from diptych.worker.cache_watch import CacheServicer
from diptych.worker.config import WorkerConfig
from diptych.worker.cores import confine_to
from diptych.worker.engine_parts import EngineParts
from diptych.worker.role import Role, RoleParts
from diptych.worker.role_admin import RoleAdmin
from diptych.worker.scratch import PoolScratch
from diptych.worker.status import WatchServicer, WorkerStatus
from diptych.worker.step_metrics import StepMetrics
from diptych.worker.worker import WorkerLife
from kvtransfer.config import TransferConfig
from kvtransfer.endpoint import TransferEndpoint
from kvtransfer.testing.fault_service import FaultsServicer, serve_faults

WORKER = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name
CACHE = cache_pb2.DESCRIPTOR.services_by_name["Cache"].full_name
WORKER_ADMIN = worker_pb2.DESCRIPTOR.services_by_name["WorkerAdmin"].full_name

_SHARED = (WORKER, CACHE, WORKER_ADMIN)  # of every worker, whichever roles it has

MakeRole = Callable[[ServiceHost, WorkerStatus], Role]


class Roles:
    """All roles of one worker, as its life sees them (see diptych.worker.worker.Serving).

    Each has an end of the transfer and scratch blocks of its own, as a worker of that role alone
    has. The end that is read from never reads, so that an agent which dies takes those of its
    readers with it at the most, and none that somebody else reads from.
    """

    def __init__(
        self,
        transfer: TransferConfig,
        status: WorkerStatus,
        roles: Sequence[Role],
        faults: FaultsServicer | None,
    ) -> None:
        self._transfer = transfer
        self._status = status
        self._roles = roles
        self._faults = faults  # of a worker that tests may break
        self._endpoints: list[TransferEndpoint] = []

    @property
    def digest_level(self) -> str:
        """See :class:`diptych.worker.worker.Serving`."""
        return self._transfer.digest_level

    @property
    def num_scratch_blocks(self) -> int:
        """See :class:`diptych.worker.worker.Serving`."""
        return len(self._roles) * self._transfer.num_scratch_blocks

    @property
    def services(self) -> list[str]:
        """Full names of what all of them serve."""
        return [*(name for role in self._roles for name in role.services), *_SHARED]

    @asynccontextmanager
    async def attached(self, parts: EngineParts, metrics: StepMetrics) -> AsyncIterator[None]:
        """Open their ends of the transfer and let every role serve."""
        async with AsyncExitStack() as ends:
            for role in self._roles:
                self._endpoints.append(await ends.enter_async_context(self._opened(role, parts)))
            async with asyncio.TaskGroup() as tasks:
                running = []
                if self._faults is not None:
                    canaries = self._faults.attach(*parts.to_break())
                    running.append(tasks.create_task(canaries.run(), name="canaries"))
                async with AsyncExitStack() as stack:
                    for role, endpoint in zip(self._roles, self._endpoints, strict=True):
                        await stack.enter_async_context(
                            role.attached(self._share(parts, metrics, endpoint))
                        )
                    self._status.describe = lambda state: self._describe(parts, state)
                    yield
                for task in running:
                    task.cancel()

    def ready_services(self) -> frozenset[str]:
        """See :class:`diptych.worker.worker.Serving`."""
        held = [role for role in self._roles if role.role in self._status.roles]
        ready = [name for role in held if role.ready() for name in role.services]
        return frozenset([*ready, *_SHARED] if ready else ())

    def transfer_stuck_s(self) -> float:
        """See :class:`diptych.worker.worker.Serving`."""
        return max((endpoint.thread.stuck_s for endpoint in self._endpoints), default=0.0)

    def unfinished_block_ids(self) -> Collection[int]:
        """See :class:`diptych.worker.worker.Serving`."""
        return [block_id for role in self._roles for block_id in role.unfinished_block_ids()]

    def num_active(self) -> int:
        """See :class:`diptych.worker.worker.Serving`."""
        return sum(role.num_active() for role in self._roles)

    def num_unfinished(self) -> int:
        """Leases and sequences of roles that the worker has not got now: they go on."""
        lost = (role for role in self._roles if role.role not in self._status.roles)
        return sum(role.num_active() for role in lost)

    def num_streams(self) -> int:
        """See :class:`diptych.worker.worker.Serving`."""
        return sum(role.num_streams() for role in self._roles)

    def end_all(self, error: DiptychError) -> None:
        """See :class:`diptych.worker.worker.Serving`."""
        for role in self._roles:
            role.end_all(error)

    @asynccontextmanager
    async def _opened(self, role: Role, parts: EngineParts) -> AsyncIterator[TransferEndpoint]:
        """One role's end: of prefill it is read from, of decode it reads."""
        endpoint = await TransferEndpoint.open(
            self._transfer,
            incarnation=self._status.incarnation,
            layout=parts.layout,
            memory=parts.memory,
            read_only=role.role == worker_pb2.WORKER_ROLE_PREFILL,
            name=ROLE_NAMES[role.role],
        )
        try:
            yield endpoint
        finally:
            await endpoint.close()

    def _share(
        self, parts: EngineParts, metrics: StepMetrics, endpoint: TransferEndpoint
    ) -> RoleParts:
        """For one role: its probes cannot take another's blocks."""
        switch = None if self._faults is None else self._faults.switch
        return RoleParts(
            parts=parts,
            metrics=metrics,
            endpoint=endpoint,
            scratch=PoolScratch(parts.scratch.allocate(self._transfer.num_scratch_blocks)),
            links=switch,
            fetches=None if switch is None else switch.context,
        )

    def _describe(self, parts: EngineParts, state: worker_pb2.WorkerState) -> None:
        parts.describe(state)
        state.faults_allowed = self._faults is not None
        for role in self._roles:
            role.describe(state)


async def serve_roles(
    config: WorkerConfig,
    makers: Mapping[worker_pb2.WorkerRole, MakeRole],
    stop: asyncio.Event,
    ready: Ready,
    *,
    held: Collection[worker_pb2.WorkerRole] = (),
) -> None:
    """Serve until ``stop`` is set, then drain for ``timers.drain_s`` at the most.

    ``makers``: of the roles that this worker could have. ``held``: those that it has at first;
    all of them, if none is named.
    """
    if config.cpus is not None:
        confine_to(config.cpus)
    status = WorkerStatus(
        *(held or makers), able=tuple(makers), zone=config.zone, nvlink_domain=config.nvlink_domain
    )
    identity = Identity.of(config.tls)
    async with ServiceHost(config, instance_id=status.incarnation, identity=identity) as host:
        made = [make(host, status) for make in makers.values()]
        for role in made:
            role.add_to(host.server)
        watch = WatchServicer(status, host.tracing)
        worker_pb2_grpc.add_WorkerServicer_to_server(watch, host.server)
        cache_pb2_grpc.add_CacheServicer_to_server(CacheServicer(status), host.server)
        faults = serve_faults(config.transfer, host.server, host.metrics)
        roles = Roles(config.transfer, status, made, faults)
        admin = RoleAdmin(status, roles.num_unfinished)
        worker_pb2_grpc.add_WorkerAdminServicer_to_server(admin, host.server)
        await host.start(roles.services)
        ready(host.port)
        await WorkerLife(config, host, status, roles).run(stop)
