"""What a source remembers of one lease and of one grant. Pure; changed by LeaseTable only."""

import enum
from collections.abc import Callable, Hashable
from typing import NamedTuple

from diptych.errors import LeaseExpiredError, TicketInvalidError
from diptych.transitions import Transitions

LeaseId = Hashable


class LeaseState(enum.Enum):
    """Where a lease stands."""

    COMPUTING = enum.auto()  # more will be announced
    COMPLETE = enum.auto()  # all of it was announced
    CLOSED = enum.auto()


class LeaseEvent(enum.Enum):
    """What moves a lease."""

    ANNOUNCE = enum.auto()
    ANNOUNCE_LAST = enum.auto()
    CLOSE = enum.auto()


LEASE_TRANSITIONS = Transitions(
    {
        LeaseState.COMPUTING: {
            LeaseEvent.ANNOUNCE: LeaseState.COMPUTING,
            LeaseEvent.ANNOUNCE_LAST: LeaseState.COMPLETE,
            LeaseEvent.CLOSE: LeaseState.CLOSED,
        },
        LeaseState.COMPLETE: {LeaseEvent.CLOSE: LeaseState.CLOSED},
    }
)


class GrantState(enum.Enum):
    """Where a grant stands."""

    VALID = enum.auto()
    REVOKED = enum.auto()  # a newer grant of the same lease
    EXPIRED = enum.auto()  # its lease closed


class GrantEvent(enum.Enum):
    """What ends a grant."""

    REVOKE = enum.auto()
    EXPIRE = enum.auto()


GRANT_TRANSITIONS = Transitions(
    {
        GrantState.VALID: {
            GrantEvent.REVOKE: GrantState.REVOKED,
            GrantEvent.EXPIRE: GrantState.EXPIRED,
        },
    }
)


class AnnouncedRange(NamedTuple):
    """Tokens whose KV is complete; ``digests`` is None until they are computed."""

    first_token: int
    num_tokens: int
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]
    digests: tuple[bytes, ...] | None  # one per block; empty at digest level off
    last: bool
    sample_seed: int = 0  # of the digests, as in kvtransfer.digest.Coverage

    @property
    def end_token(self) -> int:
        return self.first_token + self.num_tokens


class Lease:
    """One lease; changed by its table only."""

    def __init__(
        self,
        lease_id: LeaseId,
        block_ids: tuple[int, ...],
        generations: tuple[int, ...],
        num_tokens: int,
        prompt_digest: bytes,
    ) -> None:
        self.lease_id = lease_id
        self.state = LeaseState.COMPUTING
        self.block_ids = block_ids
        self.generations = generations  # when it was opened
        self.num_tokens = num_tokens
        self.prompt_digest = prompt_digest
        self.ranges: list[AnnouncedRange] = []
        self.grant: Grant | None = None
        self.watchers: set[Callable[[], None]] = set()  # its readers: called by ``changed``

    @property
    def num_announced_tokens(self) -> int:
        return self.ranges[-1].end_token if self.ranges else 0

    def move(self, event: LeaseEvent) -> None:
        self.state = LEASE_TRANSITIONS.after(self.state, event) or self.state

    def changed(self) -> None:
        """A range got its digests, the grant is another one, or the lease closed."""
        for watcher in self.watchers:
            watcher()


class Grant:
    """Permission of one reader incarnation to fetch one lease."""

    def __init__(self, lease: Lease, ticket: bytes, reader_incarnation: str) -> None:
        self.lease = lease
        self.ticket = ticket
        self.reader_incarnation = reader_incarnation
        self.state = GrantState.VALID

    def move(self, event: GrantEvent) -> None:
        self.state = GRANT_TRANSITIONS.after(self.state, event) or self.state

    def check(self) -> None:
        """Raise TicketInvalidError or LeaseExpiredError unless the grant still holds."""
        check_state(self.state)


def check_state(state: GrantState) -> None:
    """Raise what a ticket in this state is worth; return if it is valid."""
    if state is GrantState.EXPIRED:
        raise LeaseExpiredError("the lease has ended")
    if state is GrantState.REVOKED:
        raise TicketInvalidError("the ticket is unknown or was revoked")
