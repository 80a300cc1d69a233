"""The two halves of an attempt: a lease on a prefill worker, a seat on a decode worker. Pure."""

import enum
from dataclasses import dataclass

from diptych.transitions import Transitions
from diptych.v1 import common_pb2
from router.placement.types import WorkerId


class LeaseState(enum.Enum):
    """Where a lease stands. What is CLOSED is forgotten."""

    OPENING = enum.auto()  # Start sent
    HELD = enum.auto()  # accepted: the blocks are ours while the stream is open
    SAMPLED = enum.auto()  # the first token came
    CLOSED = enum.auto()


class LeaseEvent(enum.Enum):
    """What moves a lease."""

    ACCEPTED = enum.auto()
    FIRST_TOKEN = enum.auto()
    CLOSE = enum.auto()  # by us or by its worker


LEASE_TRANSITIONS = Transitions(
    {
        LeaseState.OPENING: {
            LeaseEvent.ACCEPTED: LeaseState.HELD,
            LeaseEvent.CLOSE: LeaseState.CLOSED,
        },
        LeaseState.HELD: {
            LeaseEvent.FIRST_TOKEN: LeaseState.SAMPLED,
            LeaseEvent.CLOSE: LeaseState.CLOSED,
        },
        LeaseState.SAMPLED: {LeaseEvent.CLOSE: LeaseState.CLOSED},
    },
    ignored={
        LeaseState.OPENING: {LeaseEvent.FIRST_TOKEN},
        LeaseState.HELD: {LeaseEvent.ACCEPTED},
        LeaseState.SAMPLED: {LeaseEvent.ACCEPTED, LeaseEvent.FIRST_TOKEN},
    },
)


class SeatState(enum.Enum):
    """Where a seat stands. What is CLOSED is forgotten."""

    RESERVING = enum.auto()  # Reserve sent
    RESERVED = enum.auto()  # blocks held, nothing to pull from yet
    GRANTING = enum.auto()  # the lease was asked to let this reader in
    PULLING = enum.auto()  # bound
    PROVEN = enum.auto()  # nothing is missing
    RUNNING = enum.auto()  # started
    CLOSED = enum.auto()


class SeatEvent(enum.Enum):
    """What moves a seat."""

    RESERVED = enum.auto()
    RESERVED_WHOLE = enum.auto()  # and nothing is missing
    GRANT = enum.auto()
    BIND = enum.auto()
    PULL_FAILED = enum.auto()
    PROVEN = enum.auto()
    START = enum.auto()
    CLOSE = enum.auto()  # by us or by its worker


_LATE = {SeatEvent.RESERVED, SeatEvent.RESERVED_WHOLE, SeatEvent.PULL_FAILED, SeatEvent.PROVEN}
_NOT_YET = {SeatEvent.GRANT, SeatEvent.BIND}

SEAT_TRANSITIONS = Transitions(
    {
        SeatState.RESERVING: {
            SeatEvent.RESERVED: SeatState.RESERVED,
            SeatEvent.RESERVED_WHOLE: SeatState.PROVEN,
            SeatEvent.CLOSE: SeatState.CLOSED,
        },
        SeatState.RESERVED: {
            SeatEvent.GRANT: SeatState.GRANTING,
            SeatEvent.START: SeatState.RUNNING,
            SeatEvent.CLOSE: SeatState.CLOSED,
        },
        SeatState.GRANTING: {
            SeatEvent.BIND: SeatState.PULLING,
            SeatEvent.START: SeatState.RUNNING,
            SeatEvent.CLOSE: SeatState.CLOSED,
        },
        SeatState.PULLING: {
            SeatEvent.PULL_FAILED: SeatState.RESERVED,
            SeatEvent.PROVEN: SeatState.PROVEN,
            SeatEvent.START: SeatState.RUNNING,
            SeatEvent.CLOSE: SeatState.CLOSED,
        },
        SeatState.PROVEN: {
            SeatEvent.START: SeatState.RUNNING,
            SeatEvent.CLOSE: SeatState.CLOSED,
        },
        SeatState.RUNNING: {SeatEvent.CLOSE: SeatState.CLOSED},
    },
    ignored={
        SeatState.RESERVING: {SeatEvent.PULL_FAILED, SeatEvent.PROVEN, *_NOT_YET},
        SeatState.RESERVED: {*_LATE, SeatEvent.BIND},
        SeatState.GRANTING: {*_LATE, SeatEvent.GRANT},
        SeatState.PULLING: {SeatEvent.RESERVED, SeatEvent.RESERVED_WHOLE, *_NOT_YET},
        SeatState.PROVEN: {*_LATE, *_NOT_YET},
        SeatState.RUNNING: {*_LATE, *_NOT_YET},
    },
)


@dataclass(slots=True, eq=False)
class Lease:
    """The prefill half. ``due_s`` is when it must have been accepted."""

    worker: WorkerId
    sequence_id: int
    due_s: float
    state: LeaseState = LeaseState.OPENING
    grant_id: int = 0
    ticket: bytes = b""

    def move(self, event: LeaseEvent) -> bool:
        """False if the event is ignored in this state."""
        following = LEASE_TRANSITIONS.after(self.state, event)
        self.state = following or self.state
        return following is not None


@dataclass(slots=True, eq=False)
class Seat:
    """The decode half. ``due_s`` is when it must have been reserved.

    ``compute`` is set when it shall compute what it lacks as soon as it can.
    """

    worker: WorkerId
    sequence_id: int
    due_s: float
    compute: bool = False
    state: SeatState = SeatState.RESERVING
    num_cached_tokens: int = 0
    bind_id: int = 0
    was_rebound: bool = False
    stats: common_pb2.TransferStats | None = None

    def move(self, event: SeatEvent) -> bool:
        """False if the event is ignored in this state."""
        following = SEAT_TRANSITIONS.after(self.state, event)
        self.state = following or self.state
        return following is not None
