"""The reservation of an attempt: blocks on a decode worker, and the sequence in them. Pure."""

import enum
from dataclasses import dataclass

from diptych.transitions import Transitions
from diptych.v1 import common_pb2
from router.placement.placement import Why
from router.placement.views import WorkerId


class ReservationState(enum.Enum):
    """Where a reservation stands. What is CLOSED is forgotten."""

    RESERVING = enum.auto()  # Reserve sent
    RESERVED = enum.auto()  # blocks held, nothing to pull from yet
    GRANTING = enum.auto()  # the lease was asked to let this reader in
    PULLING = enum.auto()  # bound
    PROVEN = enum.auto()  # nothing is missing
    RUNNING = enum.auto()  # started
    CLOSED = enum.auto()


class ReservationEvent(enum.Enum):
    """What moves a reservation."""

    RESERVED = enum.auto()
    RESERVED_WHOLE = enum.auto()  # and nothing is missing
    GRANT = enum.auto()
    BIND = enum.auto()
    PULL_FAILED = enum.auto()
    PROVEN = enum.auto()
    START = enum.auto()
    CLOSE = enum.auto()  # by us or by its worker


_LATE = {
    ReservationEvent.RESERVED,
    ReservationEvent.RESERVED_WHOLE,
    ReservationEvent.PULL_FAILED,
    ReservationEvent.PROVEN,
}
_NOT_YET = {ReservationEvent.GRANT, ReservationEvent.BIND}

RESERVATION_TRANSITIONS = Transitions(
    {
        ReservationState.RESERVING: {
            ReservationEvent.RESERVED: ReservationState.RESERVED,
            ReservationEvent.RESERVED_WHOLE: ReservationState.PROVEN,
            ReservationEvent.CLOSE: ReservationState.CLOSED,
        },
        ReservationState.RESERVED: {
            ReservationEvent.GRANT: ReservationState.GRANTING,
            ReservationEvent.START: ReservationState.RUNNING,
            ReservationEvent.CLOSE: ReservationState.CLOSED,
        },
        ReservationState.GRANTING: {
            ReservationEvent.BIND: ReservationState.PULLING,
            ReservationEvent.START: ReservationState.RUNNING,
            ReservationEvent.CLOSE: ReservationState.CLOSED,
        },
        ReservationState.PULLING: {
            ReservationEvent.PULL_FAILED: ReservationState.RESERVED,
            ReservationEvent.PROVEN: ReservationState.PROVEN,
            ReservationEvent.START: ReservationState.RUNNING,
            ReservationEvent.CLOSE: ReservationState.CLOSED,
        },
        ReservationState.PROVEN: {
            ReservationEvent.START: ReservationState.RUNNING,
            ReservationEvent.CLOSE: ReservationState.CLOSED,
        },
        ReservationState.RUNNING: {ReservationEvent.CLOSE: ReservationState.CLOSED},
    },
    ignored={
        ReservationState.RESERVING: {
            ReservationEvent.PULL_FAILED,
            ReservationEvent.PROVEN,
            *_NOT_YET,
        },
        ReservationState.RESERVED: {*_LATE, ReservationEvent.BIND},
        ReservationState.GRANTING: {*_LATE, ReservationEvent.GRANT},
        ReservationState.PULLING: {
            ReservationEvent.RESERVED,
            ReservationEvent.RESERVED_WHOLE,
            *_NOT_YET,
        },
        ReservationState.PROVEN: {*_LATE, *_NOT_YET},
        ReservationState.RUNNING: {*_LATE, *_NOT_YET},
    },
)


@dataclass(slots=True, eq=False)
class DecodeReservation:
    """What the request has of a decode worker. Owned by its attempt.

    ``due_s`` is when it must have been reserved, then when the lease must have let it in, moments
    of the request's clock.
    ``local`` is set when the worker shall compute what it lacks as soon as it can, and
    says why; placement then believed ``num_assumed_tokens`` to be in its prefix cache.
    ``computes_behind`` is set when it starts: the output behind which it computes what it lacks.
    ``bind_id`` counts its pulls; ``was_rebound``: one of them failed and was repeated.
    """

    worker: WorkerId
    sequence_id: int
    due_s: float
    local: Why | None = None
    num_assumed_tokens: int = 0
    state: ReservationState = ReservationState.RESERVING
    num_cached_tokens: int | None = None  # None: the worker has not said yet
    bind_id: int = 0
    was_rebound: bool = False
    stats: common_pb2.TransferStats | None = None
    computes_behind: int | None = None  # output tokens, what it lacks; None: it lacks nothing

    @property
    def is_reserving(self) -> bool:
        """Whether the worker has neither reserved nor refused."""
        return self.state is ReservationState.RESERVING

    @property
    def is_granting(self) -> bool:
        """Whether the lease was asked to let it in and has not said so."""
        return self.state is ReservationState.GRANTING

    @property
    def lacks_more_than_assumed(self) -> bool:
        """Whether it was chosen for a cached prefix that the worker turned out not to have."""
        if self.local is not Why.CHOICE or self.num_cached_tokens is None:
            return False
        return self.num_cached_tokens < self.num_assumed_tokens

    def is_computing(self, num_tokens: int) -> bool:
        """Whether it is at the prompt still, where the output has so many tokens."""
        return self.computes_behind == num_tokens

    def move(self, event: ReservationEvent) -> bool:
        """Enter the state that follows; False if the event is ignored in this one.

        Raises:
            IllegalTransitionError: the event cannot happen in this state.
        """
        following = RESERVATION_TRANSITIONS.after(self.state, event)
        self.state = following or self.state
        return following is not None
