"""The source's record of its leases: who may read which blocks, and what was announced.

Pure and synchronous; owned by the event loop. The prefill worker opens, announces, grants
and closes; :class:`~kvtransfer.source.range_digests.RangeDigests` observes what is announced,
and each Fetch watches the lease that it reads. The table holds no block: the worker's lease
stream does, and frees after ``close``.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

from diptych.errors import (
    InvalidRequestError,
    KVUnprovenError,
    LeaseExpiredError,
    TicketInvalidError,
)
from kvtransfer.digest import combined_digest
from kvtransfer.source.lease_record import (
    AnnouncedRange,
    Grant,
    GrantEvent,
    GrantState,
    Lease,
    LeaseEvent,
    LeaseId,
    LeaseState,
    check_state,
)

TICKET_BYTES = 16
MAX_ENDED_TICKETS = 4096  # remembered only to tell LEASE_EXPIRED from TICKET_INVALID


class LeaseTable:
    """All open leases of this worker.

    ``generation_of(block_id)`` is the pool's count of how often a block was
    handed out for writing.
    """

    def __init__(self, block_size: int, generation_of: Callable[[int], int]) -> None:
        self.block_size = block_size
        self._generation_of = generation_of
        self._leases: dict[LeaseId, Lease] = {}
        self._grants: dict[bytes, Grant] = {}
        self._ended: OrderedDict[bytes, GrantState] = OrderedDict()
        self._on_announced: Callable[[Lease, int], None] | None = None

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    @property
    def num_grants(self) -> int:
        """Valid ones."""
        return len(self._grants)

    @property
    def open_leases(self) -> Collection[Lease]:
        """All of them; for checks."""
        return self._leases.values()

    @property
    def valid_grants(self) -> Collection[Grant]:
        """Those that a reader may use; for checks."""
        return self._grants.values()

    def ranges(self, lease_id: LeaseId) -> Sequence[AnnouncedRange]:
        """What was announced of an open lease; nothing for another."""
        lease = self._leases.get(lease_id)
        return lease.ranges if lease is not None else ()

    def observe(self, on_announced: Callable[[Lease, int], None]) -> None:
        """Register who takes digests: told of each new range, ``lease.ranges[index]``.

        Once; ``add_digests`` has to follow each time, at once or later.
        """
        assert self._on_announced is None, "one observer"
        self._on_announced = on_announced

    def open(
        self, lease_id: LeaseId, block_ids: Sequence[int], num_tokens: int, prompt_digest: bytes
    ) -> None:
        """Record a lease on ``block_ids``, which the caller holds, for ``num_tokens`` tokens.

        ``prompt_digest`` tells readers whose KV this is; its making is the caller's.
        ``ceil(num_tokens / block_size)`` blocks are used; more are ignored.
        Raises ValueError: the id is open, no tokens, or too few blocks.
        """
        num_blocks = -(-num_tokens // self.block_size)
        if lease_id in self._leases:
            raise ValueError(f"lease {lease_id} is open")
        if num_tokens < 1 or len(block_ids) < num_blocks:
            raise ValueError(f"{num_tokens} tokens need {num_blocks} blocks, got {len(block_ids)}")
        used = tuple(block_ids[:num_blocks])
        generations = tuple(self._generation_of(block_id) for block_id in used)
        self._leases[lease_id] = Lease(lease_id, used, generations, num_tokens, prompt_digest)

    def rebase(self, lease_id: LeaseId, block_ids: Sequence[int]) -> None:
        """Some of an open lease's blocks are others now, which the caller holds instead.

        Those that were announced stay what they are. Nothing happens if the lease is closed,
        as it is when its digests failed and its stream does not know yet.
        """
        lease = self._leases.get(lease_id)
        if lease is None:
            return
        num_announced = -(-lease.num_announced_tokens // self.block_size)
        fresh = tuple(block_ids[num_announced : len(lease.block_ids)])
        lease.block_ids = lease.block_ids[:num_announced] + fresh
        lease.generations = lease.generations[:num_announced] + tuple(
            map(self._generation_of, fresh)
        )

    def announce(self, lease_id: LeaseId, upto_tokens: int) -> None:
        """KV of the first ``upto_tokens`` tokens is complete on the device.

        Call after each step (and at once for a prefix hit). Never blocks. Whole
        blocks become readable; the final partial one when ``upto_tokens`` reaches
        the lease's ``num_tokens``. Unknown leases and repeats are ignored.
        """
        lease = self._leases.get(lease_id)
        if lease is None:
            return
        last = upto_tokens >= lease.num_tokens
        first = lease.num_announced_tokens
        end = lease.num_tokens if last else upto_tokens // self.block_size * self.block_size
        if end <= first:
            return
        blocks = slice(first // self.block_size, -(-end // self.block_size))
        lease.ranges.append(
            AnnouncedRange(
                first_token=first,
                num_tokens=end - first,
                block_ids=lease.block_ids[blocks],
                generations=lease.generations[blocks],
                digests=None,
                last=last,
            )
        )
        lease.move(LeaseEvent.ANNOUNCE_LAST if last else LeaseEvent.ANNOUNCE)
        if self._on_announced is not None:
            self._on_announced(lease, len(lease.ranges) - 1)

    def add_digests(
        self, lease: Lease, index: int, digests: tuple[bytes, ...], sample_seed: int = 0
    ) -> None:
        """The digests of ``lease.ranges[index]`` were computed. No-op once closed."""
        if lease.state is LeaseState.CLOSED:
            return
        lease.ranges[index] = lease.ranges[index]._replace(digests=digests, sample_seed=sample_seed)
        lease.changed()

    def grant(self, lease_id: LeaseId, ticket: bytes, reader_incarnation: str) -> None:
        """Let one reader fetch; revokes the grant before. May precede announcements.

        Raises LeaseExpiredError: no such lease. InvalidRequestError: a ticket that
        is not 16 bytes or was used before.
        """
        lease = self._leases.get(lease_id)
        if lease is None:
            raise LeaseExpiredError("the lease has ended")
        if len(ticket) != TICKET_BYTES:
            raise InvalidRequestError(f"must be {TICKET_BYTES} bytes", field="ticket")
        if ticket in self._grants or ticket in self._ended:
            raise InvalidRequestError("was used before", field="ticket")
        if lease.grant is not None:
            self._end_grant(lease.grant, GrantEvent.REVOKE)
        lease.grant = Grant(lease, ticket, reader_incarnation)
        self._grants[ticket] = lease.grant
        lease.changed()

    def close(self, lease_id: LeaseId) -> None:
        """End the lease: readers are refused from here on. Idempotent.

        Call before the blocks are freed.
        """
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return
        lease.move(LeaseEvent.CLOSE)
        if lease.grant is not None:
            self._end_grant(lease.grant, GrantEvent.EXPIRE)
        lease.changed()

    def admit(self, ticket: bytes, reader_incarnation: str, first_token: int) -> Grant:
        """The grant under which a reader may fetch from ``first_token`` on.

        Raises TicketInvalidError, LeaseExpiredError, InvalidRequestError.
        """
        grant = self._grants.get(ticket)
        if grant is None:
            check_state(self._ended.get(ticket, GrantState.REVOKED))
            raise AssertionError("an ended grant is not valid")
        if grant.reader_incarnation != reader_incarnation:
            raise TicketInvalidError("the ticket was granted to another reader")
        if first_token % self.block_size or first_token >= grant.lease.num_tokens:
            raise InvalidRequestError(
                f"{first_token} is not the start of a block below {grant.lease.num_tokens} tokens",
                field="first_token",
            )
        return grant

    def ready_ranges(self, grant: Grant, from_token: int) -> list[AnnouncedRange]:
        """Ranges with digests, in order without gaps, from ``from_token`` (a block's start) on.

        Raises what ``Grant.check`` does.
        """
        grant.check()
        ready = []
        for announced in grant.lease.ranges:
            if announced.digests is None:
                break
            if announced.end_token > from_token:
                ready.append(self._from(announced, from_token))
        return ready

    def confirm(self, grant: Grant, first_token: int, num_tokens: int, digest: bytes) -> None:
        """Prove a pull: the lease never lapsed, no block was reused, all of it, these bytes.

        Changes nothing. ``digest`` as in the wire's Confirm. Raises what
        ``Grant.check`` does, and KVUnprovenError.
        """
        ranges = self.ready_ranges(grant, first_token)
        if not ranges or not ranges[-1].last:
            raise KVUnprovenError("asked to confirm before everything was announced")
        if first_token + num_tokens != grant.lease.num_tokens:
            raise KVUnprovenError(
                f"tokens {first_token} to {first_token + num_tokens} landed of "
                f"{grant.lease.num_tokens}"
            )
        for announced in ranges:
            for block_id, generation in zip(
                announced.block_ids, announced.generations, strict=True
            ):
                if self._generation_of(block_id) != generation:
                    raise KVUnprovenError(f"block {block_id} was reused under the lease")
        digests = [each for announced in ranges for each in announced.digests or ()]
        if digest != (combined_digest(digests) if digests else b""):
            raise KVUnprovenError("what landed is not what was announced")

    def _from(self, announced: AnnouncedRange, from_token: int) -> AnnouncedRange:
        """The part of a range from ``from_token`` on."""
        if announced.first_token >= from_token:
            return announced
        skipped = (from_token - announced.first_token) // self.block_size
        digests = announced.digests
        return announced._replace(
            first_token=from_token,
            num_tokens=announced.end_token - from_token,
            block_ids=announced.block_ids[skipped:],
            generations=announced.generations[skipped:],
            digests=digests[skipped:] if digests else digests,
        )

    def _end_grant(self, grant: Grant, event: GrantEvent) -> None:
        grant.move(event)
        del self._grants[grant.ticket]
        self._ended[grant.ticket] = grant.state
        if len(self._ended) > MAX_ENDED_TICKETS:
            self._ended.popitem(last=False)
