"""A reader's stream hears of each change of the lease that it reads, and of no other."""

import pytest

from diptych.errors import KVUnprovenError, LeaseExpiredError, TicketInvalidError
from diptych.v1.kv_source_pb2 import Confirm, FetchOpen
from kvtransfer.digest import combined_digest
from kvtransfer.source.fetch_machine import FetchMachine
from kvtransfer.source.lease_record import Lease
from kvtransfer.source.lease_table import LeaseTable

TICKETS = {"mine": b"m" * 16, "other": b"o" * 16}


class Rig:
    """Two leases of 32 tokens, and a reader of one of them."""

    def __init__(self) -> None:
        self.leases = LeaseTable(16, lambda block_id: 0)
        self.announced: list[tuple[Lease, int]] = []
        self.leases.observe(lambda lease, index: self.announced.append((lease, index)))
        for lease_id, ticket in TICKETS.items():
            self.leases.open(lease_id, [1, 2], 32, b"")
            self.leases.grant(lease_id, ticket, "reader")
        self.num_heard = 0
        self.machine = FetchMachine(
            self.leases, incarnation="source", transports=("nixl",), on_change=self._hear
        )

    def _hear(self) -> None:
        self.num_heard += 1

    def open(self, first_token: int = 0) -> None:
        self.machine.open(
            FetchOpen(
                first_token=first_token,
                reader_incarnation="reader",
                source_incarnation="source",
                transport="nixl",
                ticket=TICKETS["mine"],
            )
        )

    def digest(self) -> None:
        lease, index = self.announced.pop(0)
        num_blocks = len(lease.ranges[index].block_ids)
        self.leases.add_digests(lease, index, (b"d" * 16,) * num_blocks)


def test_it_hears_of_digests_of_a_new_grant_and_of_the_end() -> None:
    rig = Rig()
    rig.open()
    rig.leases.announce("mine", 16)
    assert (rig.num_heard, rig.machine.take_ready()) == (0, [])
    rig.digest()
    assert rig.num_heard == 1
    assert [ready.num_tokens for ready in rig.machine.take_ready()] == [16]
    rig.leases.grant("mine", b"2" * 16, "other reader")
    assert rig.num_heard == 2
    with pytest.raises(TicketInvalidError):
        rig.machine.check()
    rig.leases.close("mine")
    assert rig.num_heard == 3


def test_it_hears_nothing_before_it_is_admitted_nor_once_it_is_closed_nor_of_others() -> None:
    rig = Rig()
    rig.leases.announce("mine", 16)
    rig.digest()
    rig.open()
    rig.leases.announce("other", 32)
    rig.digest()
    rig.leases.close("other")
    assert rig.num_heard == 0
    rig.machine.close()
    rig.machine.close()
    rig.leases.close("mine")
    assert rig.num_heard == 0
    with pytest.raises(LeaseExpiredError):
        rig.machine.check()


def test_what_its_reader_has_already_is_neither_announced_nor_asked_for() -> None:
    rig = Rig()
    rig.leases.announce("mine", 32)
    rig.digest()
    rig.open(first_token=16)
    (ready,) = rig.machine.take_ready()
    assert (ready.first_token, ready.num_tokens, ready.block_ids) == (16, 16, (2,))
    whole = Confirm(num_tokens=32, digest=combined_digest([b"d" * 16] * 2))
    with pytest.raises(KVUnprovenError):
        rig.machine.confirm(whole)
    rig.machine.confirm(Confirm(num_tokens=16, digest=combined_digest([b"d" * 16])))


def test_the_end_of_the_lease_is_no_refusal_once_it_is_confirmed() -> None:
    """Its reader is about to leave."""
    rig = Rig()
    rig.open()
    rig.leases.announce("mine", 32)
    rig.digest()
    rig.machine.take_ready()
    rig.machine.confirm(Confirm(num_tokens=32, digest=combined_digest([b"d" * 16] * 2)))
    assert rig.machine.check()
    rig.leases.close("mine")
    assert not rig.machine.check()


def test_what_has_its_digests_is_not_confirmed_before_it_was_announced_here() -> None:
    rig = Rig()
    rig.open()
    rig.leases.announce("mine", 32)
    rig.digest()
    whole = Confirm(num_tokens=32, digest=combined_digest([b"d" * 16] * 2))
    with pytest.raises(KVUnprovenError, match="before everything was announced"):
        rig.machine.confirm(whole)
    rig.machine.take_ready()
    rig.machine.confirm(whole)
