"""The lease of an attempt: blocks on a prefill worker, held while a stream is open. Pure."""

import enum
from dataclasses import dataclass

from diptych.transitions import Transitions
from router.placement.views import WorkerId


class PrefillLeaseState(enum.Enum):
    """Where a lease stands. What is CLOSED is forgotten."""

    OPENING = enum.auto()  # Start sent
    HELD = enum.auto()  # accepted: the blocks are ours while the stream is open
    SAMPLED = enum.auto()  # the first token came
    CLOSED = enum.auto()


class PrefillLeaseEvent(enum.Enum):
    """What moves a lease."""

    ACCEPTED = enum.auto()
    FIRST_TOKEN = enum.auto()
    CLOSE = enum.auto()  # by us or by its worker


PREFILL_LEASE_TRANSITIONS = Transitions(
    {
        PrefillLeaseState.OPENING: {
            PrefillLeaseEvent.ACCEPTED: PrefillLeaseState.HELD,
            PrefillLeaseEvent.CLOSE: PrefillLeaseState.CLOSED,
        },
        PrefillLeaseState.HELD: {
            PrefillLeaseEvent.FIRST_TOKEN: PrefillLeaseState.SAMPLED,
            PrefillLeaseEvent.CLOSE: PrefillLeaseState.CLOSED,
        },
        PrefillLeaseState.SAMPLED: {PrefillLeaseEvent.CLOSE: PrefillLeaseState.CLOSED},
    },
    ignored={
        PrefillLeaseState.OPENING: {PrefillLeaseEvent.FIRST_TOKEN},
        PrefillLeaseState.HELD: {PrefillLeaseEvent.ACCEPTED},
        PrefillLeaseState.SAMPLED: {
            PrefillLeaseEvent.ACCEPTED,
            PrefillLeaseEvent.FIRST_TOKEN,
        },
    },
)


@dataclass(slots=True, eq=False)
class PrefillLease:
    """What the request has of a prefill worker. Owned by its attempt.

    ``due_s`` is when the lease must have been accepted, a moment of the request's clock.
    ``grant_id`` counts the readers that were let in; ``ticket`` is that of the newest.
    """

    worker: WorkerId
    sequence_id: int
    due_s: float
    state: PrefillLeaseState = PrefillLeaseState.OPENING
    grant_id: int = 0
    ticket: bytes = b""

    @property
    def is_opening(self) -> bool:
        """Whether the worker has neither accepted nor refused."""
        return self.state is PrefillLeaseState.OPENING

    def move(self, event: PrefillLeaseEvent) -> bool:
        """Enter the state that follows; False if the event is ignored in this one.

        Raises:
            IllegalTransitionError: the event cannot happen in this state.
        """
        following = PREFILL_LEASE_TRANSITIONS.after(self.state, event)
        self.state = following or self.state
        return following is not None
