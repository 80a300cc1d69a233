"""What one worker says about itself, as long as it says it."""

import logging
import time
from collections.abc import Callable
from functools import lru_cache
from operator import attrgetter
from typing import Final

import grpc
from google.protobuf.descriptor import EnumDescriptor

from diptych.errors import DiptychError
from diptych.rpc.client_stream import ClientStream, keep_open
from diptych.rpc.peer_channel import Dialer, PeerChannel
from diptych.step_model import StepModel
from diptych.v1 import worker_pb2, worker_pb2_grpc
from diptych.wire_names import ROLE_NAMES
from router.placement.views import WorkerId

logger = logging.getLogger(__name__)

_progress = attrgetter("progress")
NO_ROLES: Final[frozenset[int]] = frozenset()


def roles_of(state: worker_pb2.WorkerState) -> frozenset[int]:
    """What new work the worker takes; a worker of one role alone may not say it of ``roles``."""
    return _known(tuple(state.roles) or (state.role,))


def able_roles_of(state: worker_pb2.WorkerState) -> frozenset[int]:
    """What it could take; those of a newer worker that have no name here are left out."""
    return _known(tuple(state.able_roles)) | roles_of(state)


@lru_cache(64)  # each message says them, and they are hardly ever others
def _known(roles: tuple[int, ...]) -> frozenset[int]:
    return frozenset(role for role in roles if role in ROLE_NAMES)


def _nowhere_else(watch: "WorkerWatch", incarnation: str) -> str | None:
    """Of a watch that stands alone."""
    return None


class WorkerWatch:
    """Keeps a Watch stream to one address open and its last message.

    Owns the channel to the worker, which its other streams share. ``state`` is
    None while nothing is known: never connected, or lost; or while the same process
    is watched at another address. Knows nothing of placement. Used on the event loop only.
    """

    def __init__(
        self,
        address: str,
        wish: worker_pb2.WorkerRole,
        *,
        router_incarnation: str,
        dialer: Dialer,
        on_change: Callable[["WorkerWatch"], None],
        elsewhere: Callable[["WorkerWatch", str], str | None] = _nowhere_else,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``wish``: a role that its certificate has to name, where the cluster is locked.

        ``elsewhere`` is where else the process of an incarnation is watched, None: nowhere.
        """
        self.address = address
        self._peer = PeerChannel(dialer, address, ROLE_NAMES[wish])
        self.state: worker_pb2.WorkerState | None = None
        self.step_model: StepModel | None = None  # that it tells of; None: it does not
        self.heard_s = 0.0  # when it came, by the clock
        self._wrong = ""  # incarnation of a process at the address of no role that we know
        self._twin = ""  # incarnation of a process that is watched elsewhere
        self._is_foreign = False  # what is at the address has no Watch; it was said
        self._router_incarnation = router_incarnation
        self._timers = dialer.timers
        self._is_locked = dialer.identity is not None
        self._refusal = ""  # why no lock opened, as it was said last
        self._on_change = on_change
        self._elsewhere = elsewhere
        self._clock = clock

    def expect(self, wish: worker_pb2.WorkerRole) -> None:
        """What the certificate has to name of whoever is met there next."""
        self._peer.expect(ROLE_NAMES[wish])

    @property
    def channel(self) -> grpc.aio.Channel:
        """To the worker, which was heard on it."""
        return self._peer.channel

    @property
    def worker(self) -> WorkerId | None:
        """Who is there now."""
        return None if self.state is None else WorkerId(self.address, self.state.incarnation)

    @property
    def now_s(self) -> float:
        """By the clock by which it was heard."""
        return self._clock()

    @property
    def can_decode(self) -> bool:
        """Whether it serves Decode streams, whether or not it takes new sequences now."""
        return self.state is not None and worker_pb2.WORKER_ROLE_DECODE in able_roles_of(self.state)

    @property
    def is_ready(self) -> bool:
        """Whether it takes new work."""
        return self.state is not None and self.state.state == worker_pb2.SERVING_STATE_READY

    @property
    def is_serving(self) -> bool:
        """Whether it has work or may take some: ready, or draining."""
        return self.is_ready or (
            self.state is not None and self.state.state == worker_pb2.SERVING_STATE_DRAINING
        )

    @property
    def may_have_leases(self) -> bool:
        """Whether KV may be pulled from it.

        One of several roles may wait for a pair with leases of a role that it gave up.
        """
        if self.state is None or not self.is_alive:
            return False
        is_loaded = self.state.layout.block_bytes > 0
        return self.is_serving or (is_loaded and len(able_roles_of(self.state)) > 1)

    @property
    def is_alive(self) -> bool:
        """Whether it says anything but that it failed: it may need a router to get ready."""
        failed = worker_pb2.SERVING_STATE_FAILED
        return self.state is not None and self.state.state != failed

    async def run(self) -> None:
        """Watch until cancelled; the channel is closed then."""
        try:
            await keep_open(self._watch)
        finally:
            self.state = None
            await self._peer.close()

    async def _watch(self) -> bool:
        """Run one stream to its end; True if anything came."""
        stub = worker_pb2_grpc.WorkerStub(await self._peer.renewed())
        call = stub.Watch(worker_pb2.WatchRequest(router_incarnation=self._router_incarnation))
        ended = await ClientStream(call, self._timers, progress=_progress).run(self._update)
        seen = self.state is not None
        if seen:
            self._lose(ended.message)
        elif ended.code is grpc.StatusCode.UNIMPLEMENTED and not self._is_foreign:
            self._is_foreign = True
            extra = {"worker": self.address, "why": ended.message}
            logger.error("no worker of this protocol: not used", extra=extra)
        elif self._is_locked and ended.message != self._refusal and not _is_absent(ended):
            self._refusal = ended.message
            extra = {"worker": self.address, "why": ended.message}
            logger.warning("worker not reached", extra=extra)
        return seen

    def _update(self, state: worker_pb2.WorkerState) -> None:
        self._is_foreign, self._refusal = False, ""
        if not able_roles_of(state):
            if state.incarnation != self._wrong:  # once for each process, not for each message
                self._wrong = state.incarnation
                role = _name(worker_pb2.WorkerRole.DESCRIPTOR, state.role)
                logger.error("no role known here", extra={"worker": self.address, "is": role})
            if self.state is None:
                return  # one that was used has to be used no more
        if self._is_twin(state.incarnation):
            return
        before, self.state = self.state, state
        is_told = state.HasField("step_model")
        self.step_model = StepModel.from_proto(state.step_model) if is_told else None
        self.heard_s = self._clock()
        if before is None or before.incarnation != state.incarnation:
            logger.info(
                "worker found",
                extra={"worker": self.address, "incarnation": state.incarnation},
            )
        roles, earlier = roles_of(state), NO_ROLES if before is None else roles_of(before)
        if roles != earlier:
            names = sorted(ROLE_NAMES[role] for role in roles)
            logger.info("worker roles", extra={"worker": self.address, "roles": names})
        if before is not None and before.state != state.state:
            name = _name(worker_pb2.ServingState.DESCRIPTOR, state.state)
            logger.info("worker state", extra={"worker": self.address, "state": name})
        self._on_change(self)

    def _is_twin(self, incarnation: str) -> bool:
        """Whether that process is watched elsewhere; it is taken over once it no longer is."""
        if self.state is not None and self.state.incarnation == incarnation:
            return False
        other = self._elsewhere(self, incarnation)
        if other is None:
            self._twin = ""
            return False
        if incarnation != self._twin:  # once for each process, not for each message
            self._twin = incarnation
            extra = {"worker": self.address, "used_at": other, "incarnation": incarnation}
            logger.error("the same worker at two addresses", extra=extra)
        if self.state is not None:
            self._lose("another is there, which is watched elsewhere")
        return True

    def _lose(self, why: str) -> None:
        logger.warning("worker lost", extra={"worker": self.address, "why": why})
        self.state = None
        self._on_change(self)


def _is_absent(error: DiptychError) -> bool:
    """Nobody listens there, or not yet."""
    return "Connection refused" in error.message


def _name(enum: EnumDescriptor, value: int) -> str:
    """A newer worker's values have no name here."""
    known = enum.values_by_number.get(value)
    return str(value) if known is None else known.name
