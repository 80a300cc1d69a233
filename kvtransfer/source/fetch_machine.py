"""What a source decides in one Fetch of a lease: admit, announce each range once, confirm. Pure.

The shell is :mod:`kvtransfer.source.fetch_session`. Event loop only.
"""

import enum
from collections.abc import Callable, Collection

from diptych.errors import (
    DiptychError,
    InvalidRequestError,
    KVUnprovenError,
    TransferInterruptedError,
)
from diptych.transitions import Transitions
from diptych.v1 import kv_source_pb2
from kvtransfer.source.lease_record import AnnouncedRange, Grant
from kvtransfer.source.lease_table import LeaseTable


class FetchState(enum.Enum):
    """Where a Fetch stands. It ends with its stream."""

    NEW = enum.auto()  # Open to come
    ANNOUNCING = enum.auto()  # admitted; more ranges to come
    ANNOUNCED = enum.auto()  # all of it: Confirm may come
    CONFIRMED = enum.auto()  # the reader has what it came for, and may ask again


class FetchEvent(enum.Enum):
    """What moves it."""

    ADMIT = enum.auto()
    ANNOUNCE = enum.auto()
    ANNOUNCE_LAST = enum.auto()
    CONFIRM = enum.auto()


FETCH_TRANSITIONS = Transitions(
    {
        FetchState.NEW: {FetchEvent.ADMIT: FetchState.ANNOUNCING},
        FetchState.ANNOUNCING: {
            FetchEvent.ANNOUNCE: FetchState.ANNOUNCING,
            FetchEvent.ANNOUNCE_LAST: FetchState.ANNOUNCED,
        },
        FetchState.ANNOUNCED: {FetchEvent.CONFIRM: FetchState.CONFIRMED},
        FetchState.CONFIRMED: {FetchEvent.CONFIRM: FetchState.CONFIRMED},
    },
)


class FetchMachine:
    """One reader's stream on a lease. Invariant: served only while its grant is valid."""

    def __init__(
        self,
        leases: LeaseTable,
        *,
        incarnation: str,
        transports: Collection[str],
        on_change: Callable[[], None],
    ) -> None:
        """``incarnation`` is this source's own.

        ``on_change`` is called, from ``open`` to ``close``, when there may be more to take, or
        the grant may have ended; it only notes that.
        """
        self.state = FetchState.NEW
        self._leases = leases
        self._incarnation = incarnation
        self._transports = transports
        self._on_change = on_change
        self._grant: Grant | None = None
        self._first_token = 0
        self._next_token = 0

    def check_open(self, command: kv_source_pb2.FetchOpen) -> None:
        """Raise unless the reader means this process and one of its transports."""
        if self.state is not FetchState.NEW:
            raise InvalidRequestError("comes once", field="open")
        if command.source_incarnation != self._incarnation:
            raise TransferInterruptedError(
                f"this is {self._incarnation}, not {command.source_incarnation}"
            )
        if command.transport not in self._transports:
            raise InvalidRequestError("is not configured here", field="transport")

    def open(self, command: kv_source_pb2.FetchOpen) -> kv_source_pb2.FetchOpened:
        """Admit the reader. Raises as ``check_open`` and ``LeaseTable.admit``."""
        self.check_open(command)
        self._grant = self._leases.admit(
            command.ticket, command.reader_incarnation, command.first_token
        )
        self._first_token = self._next_token = command.first_token
        self._move(FetchEvent.ADMIT)
        lease = self._grant.lease
        lease.watchers.add(self._on_change)
        return kv_source_pb2.FetchOpened(
            end_token=lease.num_tokens, prompt_digest=lease.prompt_digest
        )

    def close(self) -> None:
        """The stream is over. Idempotent."""
        if self._grant is not None:
            self._grant.lease.watchers.discard(self._on_change)

    def check(self) -> bool:
        """Whether there is more to do. Raises what the grant is worth once it does not hold.

        The end of the lease of a confirmed fetch is no refusal: its reader is about to leave.
        """
        if self._grant is None:
            return True
        try:
            self._grant.check()
        except DiptychError:
            if self.state is FetchState.CONFIRMED:
                return False
            raise
        return True

    def take_ready(self) -> list[AnnouncedRange]:
        """The ranges that can be announced now, each once. Raises as ``check``."""
        if self._grant is None or self.state is not FetchState.ANNOUNCING:
            return []
        ready = self._leases.ready_ranges(self._grant, self._next_token)
        for announced in ready:
            self._next_token = announced.end_token
            self._move(FetchEvent.ANNOUNCE_LAST if announced.last else FetchEvent.ANNOUNCE)
        return ready

    def confirm(self, command: kv_source_pb2.Confirm) -> None:
        """Answer the reader's question. Raises as ``LeaseTable.confirm``."""
        if self._grant is None:
            raise InvalidRequestError("came before open", field="confirm")
        self._leases.confirm(self._grant, self._first_token, command.num_tokens, command.digest)
        if self.state is FetchState.ANNOUNCING:  # by its digests it could be
            raise KVUnprovenError("asked to confirm before everything was announced")
        self._move(FetchEvent.CONFIRM)

    def _move(self, event: FetchEvent) -> None:
        self.state = FETCH_TRANSITIONS.after(self.state, event) or self.state
