"""LeaseTable confirms a pull only if lease, grant, blocks, coverage and bytes are unbroken."""

from collections import Counter
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from diptych.errors import (
    DiptychError,
    InvalidRequestError,
    KVUnprovenError,
    LeaseExpiredError,
    TicketInvalidError,
)
from kvtransfer.digest import block_digest, combined_digest
from kvtransfer.source import lease_table
from kvtransfer.source.lease_record import AnnouncedRange, Grant, Lease, LeaseState
from kvtransfer.source.lease_table import LeaseTable
from tests import notes

BLOCK_SIZE = 4
DIGEST = b"p" * 16
READERS = ["r0", "r1"]
UNKNOWN = b"?" * 16  # a ticket of which nobody knows
SELDOM = st.sampled_from([False] * 9 + [True])


class Blocks:
    """Generations and content of the source's blocks, and the digests to deliver."""

    def __init__(self) -> None:
        self.generations = [0] * 64
        self.pending: list[tuple[Lease, int]] = []

    def generation(self, block_id: int) -> int:
        return self.generations[block_id]

    def content(self, block_id: int) -> bytes:
        return f"{block_id}.{self.generations[block_id]}".encode()

    def on_announced(self, lease: Lease, index: int) -> None:
        self.pending.append((lease, index))


def table(blocks: Blocks) -> LeaseTable:
    leases = LeaseTable(BLOCK_SIZE, blocks.generation)
    leases.observe(blocks.on_announced)
    return leases


def deliver(leases: LeaseTable, blocks: Blocks, index: int = 0) -> None:
    lease, range_index = blocks.pending.pop(index)
    ids = lease.ranges[range_index].block_ids
    leases.add_digests(lease, range_index, tuple(block_digest(blocks.content(i)) for i in ids))


class LeaseMachine(RuleBasedStateMachine):
    """A model of one reader's rights next to the real table."""

    met: ClassVar[Counter[str]] = Counter()  # what has happened, of all runs

    @initialize(num_tokens=st.integers(1, 30))
    def start(self, num_tokens: int) -> None:
        self.blocks = Blocks()
        self.leases = table(self.blocks)
        self.num_tokens = num_tokens
        self.block_ids = list(range(-(-num_tokens // BLOCK_SIZE)))
        self.opened = [self.blocks.content(i) for i in self.block_ids]
        self.leases.open("lease", self.block_ids, num_tokens, DIGEST)
        self.closed = False
        self.announced = 0
        self.issued: list[tuple[bytes, str]] = []  # tickets, and to whom
        self.valid: tuple[bytes, str] | None = None
        self.grants: list[tuple[Grant, bytes, int]] = []  # admitted, its ticket, first token

    @rule(upto=st.integers(0, 40))
    def announce(self, upto: int) -> None:
        self.leases.announce("lease", upto)
        if not self.closed:
            whole = upto // BLOCK_SIZE * BLOCK_SIZE
            reached = self.num_tokens if upto >= self.num_tokens else whole
            self.announced = max(self.announced, reached)

    @precondition(lambda self: self.blocks.pending)
    @rule(data=st.data())
    def digests_come(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.blocks.pending) - 1))
        deliver(self.leases, self.blocks, index)

    @rule(reader=st.sampled_from(READERS))
    def grant(self, reader: str) -> None:
        ticket = len(self.issued).to_bytes(16, "little")
        if self.closed:
            with pytest.raises(LeaseExpiredError):
                self.leases.grant("lease", ticket, reader)
        else:
            self.leases.grant("lease", ticket, reader)
            self.valid = (ticket, reader)
            self.issued.append(self.valid)

    @precondition(lambda self: self.issued)
    @rule(data=st.data(), reader=st.sampled_from(READERS))
    def grant_again(self, data: st.DataObject, reader: str) -> None:
        """A ticket is good for one grant, however that has ended."""
        ticket, _ = data.draw(st.sampled_from(self.issued))
        with pytest.raises(LeaseExpiredError if self.closed else InvalidRequestError):
            self.leases.grant("lease", ticket, reader)

    @precondition(lambda self: self.issued)
    @rule(data=st.data(), is_other=SELDOM)
    def admit(self, data: st.DataObject, is_other: bool) -> None:
        """Mostly who holds the last ticket."""
        ticket, reader = self.issued[-1]
        if is_other:
            ticket = data.draw(st.sampled_from([*(each for each, _ in self.issued), UNKNOWN]))
            reader = data.draw(st.sampled_from(READERS))
        first = data.draw(st.integers(0, len(self.block_ids))) * BLOCK_SIZE
        try:
            grant = self.leases.admit(ticket, reader, first)
        except InvalidRequestError:
            assert first >= self.num_tokens
        except (TicketInvalidError, LeaseExpiredError):
            assert self.closed or self.valid != (ticket, reader)
        else:
            assert self.valid == (ticket, reader)
            assert not self.closed
            self.grants.append((grant, ticket, first))
            self.met["admitted"] += 1

    @rule(block=st.integers(0, 7), is_broken=SELDOM)
    def reuse_a_block(self, block: int, is_broken: bool) -> None:
        self.blocks.generations[block] += is_broken

    @rule(ends=SELDOM)
    def close(self, ends: bool) -> None:
        if ends:
            self.leases.close("lease")
            self.closed = True
            self.valid = None

    @precondition(lambda self: self.grants)
    @rule(data=st.data(), cut=st.sampled_from([0, 0, 0, -1, 1]), lies=SELDOM)
    def confirm(self, data: st.DataObject, cut: int, lies: bool) -> None:
        self.confirm_one(*data.draw(st.sampled_from(self.grants)), cut, lies)

    def confirm_one(self, grant: Grant, ticket: bytes, first: int, cut: int, lies: bool) -> None:
        """Confirmed if all that it has to be is so, and only then."""
        contents = self.opened[first // BLOCK_SIZE :]
        digests = [block_digest(content) for content in contents]
        current = [self.blocks.content(i) for i in self.block_ids[first // BLOCK_SIZE :]]
        is_granted = self.valid is not None and self.valid[0] == ticket
        is_whole = self.announced == self.num_tokens and not self.blocks.pending
        try:
            digest = combined_digest(digests[:-1] if lies else digests)
            self.leases.confirm(grant, first, self.num_tokens - first + cut, digest)
        except LeaseExpiredError:
            assert self.closed
        except TicketInvalidError:
            assert not is_granted
        except KVUnprovenError:
            assert is_granted
            assert cut or lies or not is_whole or current != contents
            self.met["unproven"] += 1
        else:
            assert is_granted
            assert is_whole
            assert not cut
            assert not lies
            assert current == contents
            self.met["confirmed"] += 1

    def teardown(self) -> None:
        """Every reader asks, and one more that is let in last, before all is there and then."""
        if not hasattr(self, "leases"):
            return
        if not self.closed:
            self.grant(READERS[0])
            ticket, reader = self.issued[-1]
            self.grants.append((self.leases.admit(ticket, reader, 0), ticket, 0))
            self.confirm_one(*self.grants[-1], cut=0, lies=False)
        self.announce(self.num_tokens)
        while self.blocks.pending:
            deliver(self.leases, self.blocks)
        for admitted in self.grants:
            self.confirm_one(*admitted, cut=-1, lies=False)
            self.confirm_one(*admitted, cut=0, lies=True)
            self.confirm_one(*admitted, cut=0, lies=False)

    @invariant()
    def ready_ranges_are_contiguous_and_digested(self) -> None:
        for grant, _, first in self.grants:
            try:
                ready = self.leases.ready_ranges(grant, first)
            except DiptychError:
                continue
            end = first
            for announced in ready:
                assert announced.first_token == end
                assert announced.digests is not None
                num_blocks = -(-announced.num_tokens // BLOCK_SIZE)
                assert len(announced.block_ids) == len(announced.digests) == num_blocks
                end = announced.end_token
                assert announced.last == (end == self.num_tokens)
            assert end <= max(self.announced, first)

    @invariant()
    def counts_are_those_of_the_model(self) -> None:
        assert self.leases.num_leases == (not self.closed)
        assert self.leases.num_grants == (self.valid is not None)


def test_exactly_unbroken_pulls_are_confirmed_whatever_comes_in_whatever_order(
    note: notes.Note,
) -> None:
    LeaseMachine.met.clear()
    search = settings(max_examples=100, stateful_step_count=30)
    run_state_machine_as_test(LeaseMachine, settings=search)
    met = {event: LeaseMachine.met[event] for event in ("admitted", "unproven", "confirmed")}
    note(f"leases: {met}")
    assert all(met.values()), met


def opened(num_tokens: int = 10) -> tuple[LeaseTable, Blocks, Grant]:
    blocks = Blocks()
    leases = table(blocks)
    leases.open("lease", [5, 6, 7], num_tokens, DIGEST)
    leases.grant("lease", b"t" * 16, "reader")
    return leases, blocks, leases.admit(b"t" * 16, "reader", 0)


def digest_of(blocks: Blocks, *block_ids: int) -> bytes:
    return combined_digest(block_digest(blocks.content(i)) for i in block_ids)


def test_a_closed_lease_is_not_rebased() -> None:
    """Its stream may not know yet that it was closed, as when a digest failed."""
    blocks = Blocks()
    leases = table(blocks)
    leases.open(1, [3, 4], 8, DIGEST)
    leases.close(1)
    leases.rebase(1, [5, 6])
    assert not leases.open_leases


def test_a_whole_pull_is_confirmed_as_often_as_asked() -> None:
    leases, blocks, grant = opened()
    leases.announce("lease", 9)
    leases.announce("lease", 10)
    while blocks.pending:
        deliver(leases, blocks)
    for _ in range(2):
        leases.confirm(grant, 0, 10, digest_of(blocks, 5, 6, 7))
    leases.confirm(grant, 4, 6, digest_of(blocks, 6, 7))


def test_ranges_become_ready_in_order_whatever_order_digests_come_in() -> None:
    leases, blocks, grant = opened()
    leases.announce("lease", 4)
    leases.announce("lease", 10)
    deliver(leases, blocks, 1)
    assert leases.ready_ranges(grant, 0) == []
    deliver(leases, blocks)
    assert [r.block_ids for r in leases.ready_ranges(grant, 0)] == [(5,), (6, 7)]
    assert [r.block_ids for r in leases.ready_ranges(grant, 8)] == [(7,)]


def test_a_reused_block_is_never_confirmed() -> None:
    leases, blocks, grant = opened()
    leases.announce("lease", 10)
    deliver(leases, blocks)
    digest = digest_of(blocks, 5, 6, 7)
    blocks.generations[6] += 1
    with pytest.raises(KVUnprovenError, match="reused"):
        leases.confirm(grant, 0, 10, digest)


def test_without_digests_the_rest_is_still_checked() -> None:
    leases, blocks, grant = opened()
    leases.announce("lease", 4)
    leases.add_digests(*blocks.pending.pop(), ())
    with pytest.raises(KVUnprovenError):
        leases.confirm(grant, 0, 10, b"")
    leases.announce("lease", 10)
    leases.add_digests(*blocks.pending.pop(), ())
    leases.confirm(grant, 0, 10, b"")
    with pytest.raises(KVUnprovenError):
        leases.confirm(grant, 0, 9, b"")
    blocks.generations[5] += 1
    with pytest.raises(KVUnprovenError):
        leases.confirm(grant, 0, 10, b"")


def test_the_reason_tells_an_ended_lease_from_a_revoked_ticket() -> None:
    leases, _, grant = opened()
    leases.grant("lease", b"u" * 16, "reader")
    with pytest.raises(TicketInvalidError):
        grant.check()
    with pytest.raises(TicketInvalidError):
        leases.admit(b"t" * 16, "reader", 0)
    leases.close("lease")
    leases.close("lease")
    with pytest.raises(LeaseExpiredError):
        leases.admit(b"u" * 16, "reader", 0)
    with pytest.raises(TicketInvalidError):
        leases.admit(b"t" * 16, "reader", 0)


def test_of_the_tickets_that_ended_the_oldest_are_forgotten_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lease_table, "MAX_ENDED_TICKETS", 1)
    leases, _, _ = opened()
    leases.grant("lease", b"u" * 16, "reader")
    leases.close("lease")
    with pytest.raises(LeaseExpiredError):
        leases.admit(b"u" * 16, "reader", 0)
    with pytest.raises(TicketInvalidError):
        leases.admit(b"t" * 16, "reader", 0)


def test_bad_arguments_are_refused() -> None:
    leases, _, _ = opened()
    with pytest.raises(ValueError, match="is open"):
        leases.open("lease", [1], 1, DIGEST)
    with pytest.raises(ValueError, match="need 2 blocks"):
        leases.open("other", [1], 5, DIGEST)
    with pytest.raises(InvalidRequestError, match="16 bytes"):
        leases.grant("lease", b"short", "reader")
    with pytest.raises(InvalidRequestError, match="used before"):
        leases.grant("lease", b"t" * 16, "reader")
    with pytest.raises(InvalidRequestError, match="first_token"):
        leases.admit(b"t" * 16, "reader", 3)
    leases.grant("lease", b"u" * 16, "reader")
    with pytest.raises(InvalidRequestError, match="used before"):
        leases.grant("lease", b"t" * 16, "reader")


def test_digests_that_come_after_the_end_are_dropped() -> None:
    leases, blocks, grant = opened()
    leases.announce("lease", 10)
    leases.close("lease")
    lease = grant.lease
    deliver(leases, blocks)
    assert lease.state is LeaseState.CLOSED
    assert lease.ranges == [AnnouncedRange(0, 10, (5, 6, 7), (0, 0, 0), None, True)]
    leases.announce("lease", 10)
