"""The two halves of an attempt: a lease on a prefill worker, a seat on a decode worker. Pure."""

import enum
from dataclasses import dataclass

from diptych.v1 import common_pb2
from router.placement import WorkerId


class LeaseState(enum.Enum):
    """Where a lease stands. What is CLOSED is forgotten."""

    OPENING = enum.auto()  # Start sent
    HELD = enum.auto()  # accepted: the blocks are ours while the stream is open
    SAMPLED = enum.auto()  # the first token came
    CLOSED = enum.auto()


_NEXT_LEASE: dict[LeaseState, frozenset[LeaseState]] = {
    LeaseState.OPENING: frozenset({LeaseState.HELD, LeaseState.CLOSED}),
    LeaseState.HELD: frozenset({LeaseState.SAMPLED, LeaseState.CLOSED}),
    LeaseState.SAMPLED: frozenset({LeaseState.CLOSED}),
    LeaseState.CLOSED: frozenset(),
}


class SeatState(enum.Enum):
    """Where a seat stands. What is CLOSED is forgotten."""

    RESERVING = enum.auto()  # Reserve sent
    RESERVED = enum.auto()  # blocks held, nothing to pull from yet
    GRANTING = enum.auto()  # the lease was asked to let this reader in
    PULLING = enum.auto()  # bound
    PROVEN = enum.auto()  # nothing is missing
    RUNNING = enum.auto()  # started
    CLOSED = enum.auto()


_NEXT_SEAT: dict[SeatState, frozenset[SeatState]] = {
    SeatState.RESERVING: frozenset({SeatState.RESERVED, SeatState.PROVEN, SeatState.CLOSED}),
    SeatState.RESERVED: frozenset({SeatState.GRANTING, SeatState.RUNNING, SeatState.CLOSED}),
    SeatState.GRANTING: frozenset({SeatState.PULLING, SeatState.RUNNING, SeatState.CLOSED}),
    SeatState.PULLING: frozenset(
        {SeatState.RESERVED, SeatState.PROVEN, SeatState.RUNNING, SeatState.CLOSED}
    ),
    SeatState.PROVEN: frozenset({SeatState.RUNNING, SeatState.CLOSED}),
    SeatState.RUNNING: frozenset({SeatState.CLOSED}),
    SeatState.CLOSED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Lease:
    """The prefill half. ``due_s`` is when it must have been accepted."""

    worker: WorkerId
    sequence_id: int
    due_s: float
    state: LeaseState = LeaseState.OPENING
    grant_id: int = 0
    ticket: bytes = b""

    def move(self, state: LeaseState) -> None:
        assert state in _NEXT_LEASE[self.state], f"{self.state} -> {state}"
        self.state = state


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

    def move(self, state: SeatState) -> None:
        assert state in _NEXT_SEAT[self.state], f"{self.state} -> {state}"
        self.state = state
