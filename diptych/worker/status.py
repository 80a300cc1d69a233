"""How a worker stands: loading, ready, draining, failed. One object per process, on the loop."""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

from diptych.cache_log import CacheLog
from diptych.errors import RETRY_LATER_S, NoWorkerError, WorkerDrainingError
from diptych.rpc.server import Context
from diptych.telemetry.tracing import Tracing
from diptych.v1 import worker_pb2, worker_pb2_grpc
from diptych.v1.worker_pb2 import ServingState, WorkerRole
from diptych.wire_names import ROLE_NAMES
from diptych.worker.held_roles import HeldRoles, RoleChange

logger = logging.getLogger(__name__)

# Between two messages of one Watch stream: at the least, when only the load is another
# (each step of the engine changes it), and at the most.
_LEAST_GAP_S = 0.02
LOAD_GAP_S = 0.25
_LONGEST_GAP_S = 1.0


class WorkerStatus:
    """The serving state of this process, and who wants to know of changes.

    ``incarnation`` is minted here: once per process start. Knows no engine; what
    else Watch tells is filled in by ``describe`` once there is something to tell, and
    ``cache_log`` is what WatchCache tells of.
    """

    def __init__(
        self,
        *roles: WorkerRole,
        able: Collection[WorkerRole] = (),
        zone: str = "",
        nvlink_domain: str = "",
    ) -> None:
        """``roles`` are those it has at first, ``able`` all that it could have, if more.

        Where it runs, as far as it is known, is told with everything else.
        """
        self._roles = HeldRoles(able or roles, roles)
        self._zone = zone
        self._nvlink_domain = nvlink_domain
        self.incarnation = uuid.uuid4().hex
        self.state: ServingState = worker_pb2.SERVING_STATE_STARTING
        self.message = "loading"
        self.loaded = False  # the engine exists
        self.cache_log: CacheLog | None = None  # of the engine, if it has one
        self.describe: Callable[[worker_pb2.WorkerState], None] = lambda state: None
        self._watchers: set[asyncio.Event] = set()
        self._urgent_watchers: dict[asyncio.Event, str] = {}  # and which router each is

    def set(self, state: ServingState, message: str = "") -> None:
        """Move to ``state``; Watch tells within 20 ms. Draining and failed are final."""
        if (state, message) == (self.state, self.message):
            return
        final = (worker_pb2.SERVING_STATE_DRAINING, worker_pb2.SERVING_STATE_FAILED)
        if self.state in final and state not in final:
            return
        if state != self.state:
            name = worker_pb2.ServingState.Name(state)
            logger.info("worker state", extra={"state": name, "reason": message})
        self.state, self.message = state, message
        self.changed()

    def changed(self) -> None:
        """Something that Watch tells is different now: who may place on this worker looks at it."""
        self.load_changed()
        for watcher in self._urgent_watchers:
            watcher.set()

    def work_came(self, router: str) -> None:
        """That router's. Others hear of it at once: they would send theirs to the same worker."""
        self.load_changed()
        for watcher, name in self._urgent_watchers.items():
            if name != router:
                watcher.set()

    def load_changed(self) -> None:
        """The load that Watch tells is different now; a router may hear of it a little later."""
        for watcher in self._watchers:
            watcher.set()

    def admit(self) -> None:
        """Raise unless new work may be taken: NoWorkerError or WorkerDrainingError."""
        if self.state == worker_pb2.SERVING_STATE_DRAINING:
            raise WorkerDrainingError("the worker shuts down")
        if self.state == worker_pb2.SERVING_STATE_FAILED:
            raise NoWorkerError(f"the worker failed: {self.message}")
        if not self.loaded:
            raise still_loading()

    @property
    def roles(self) -> tuple[WorkerRole, ...]:
        """Those it has now."""
        return self._roles.held

    def set_roles(self, wanted: Collection[int]) -> RoleChange:
        """Have exactly these from now on; Watch tells within 20 ms. Raises InvalidRequestError."""
        change = self._roles.change(wanted)
        if change.before != change.now:
            names = {"before": _names(change.before), "now": _names(change.now)}
            logger.info("worker roles", extra=names)
            self.changed()
        return change

    def admit_as(self, role: WorkerRole) -> None:
        """As ``admit``, for work of that role; WorkerDrainingError: it has not got it now."""
        self.admit()
        self._roles.check(role)

    def snapshot(self) -> worker_pb2.WorkerState:
        """All that Watch tells, now."""
        state = worker_pb2.WorkerState(
            incarnation=self.incarnation,
            role=self.roles[0],
            roles=self.roles,
            able_roles=self._roles.able,
            state=self.state,
            message=self.message,
            zone=self._zone,
            nvlink_domain=self._nvlink_domain,
        )
        self.describe(state)
        return state

    @contextmanager
    def watching(self) -> Iterator[asyncio.Event]:
        """An event that is set at each change, while the context lasts."""
        with _in(self._watchers) as event:
            yield event

    @contextmanager
    def watching_urgently(self, router: str = "") -> Iterator[asyncio.Event]:
        """An event that is set at each change but those of the load, while the context lasts.

        And where other routers' work came than that one's, who watches.
        """
        event = asyncio.Event()
        self._urgent_watchers[event] = router
        try:
            yield event
        finally:
            del self._urgent_watchers[event]


def _names(roles: Iterable[WorkerRole]) -> str:
    return ",".join(ROLE_NAMES[role] for role in roles)


def still_loading() -> NoWorkerError:
    """What a call that needs the engine is answered before there is one."""
    return NoWorkerError("the worker is loading its model", retry_after_s=RETRY_LATER_S)


class WatchServicer(worker_pb2_grpc.WorkerServicer):
    """Worker: Watch tells whole states, at once, on change, and at least each second."""

    def __init__(self, status: WorkerStatus, spans: Tracing) -> None:
        self._status = status
        self._spans = spans

    async def Watch(
        self, request: worker_pb2.WatchRequest, context: Context
    ) -> AsyncIterator[worker_pb2.WorkerState]:
        """Stream states until the router goes or the process ends."""
        logger.debug("watched", extra={"router_incarnation": request.router_incarnation})
        status = self._status
        with (
            status.watching() as changed,
            status.watching_urgently(request.router_incarnation) as urgent,
        ):
            while True:
                changed.clear()
                urgent.clear()
                yield status.snapshot()
                await asyncio.sleep(_LEAST_GAP_S)
                await _wait(urgent, LOAD_GAP_S - _LEAST_GAP_S)
                await _wait(changed, _LONGEST_GAP_S - LOAD_GAP_S)

    async def EndTraces(
        self, request: worker_pb2.EndTracesRequest, context: Context
    ) -> worker_pb2.EndTracesResponse:
        """Send or drop held spans as the router says; our clock."""
        for hold in request.keep:
            self._spans.decide(hold, keep=True)
        for hold in request.drop:
            self._spans.decide(hold, keep=False)
        return worker_pb2.EndTracesResponse(time_s=self._spans.now_s())


@contextmanager
def _in(watchers: set[asyncio.Event]) -> Iterator[asyncio.Event]:
    event = asyncio.Event()
    watchers.add(event)
    try:
        yield event
    finally:
        watchers.discard(event)


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
