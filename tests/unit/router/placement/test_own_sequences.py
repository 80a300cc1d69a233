"""Whose sequences of a router are on a decode worker, and who may have its last place."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from router.placement.own_sequences import NO_SHARES, OwnSequences, Shares
from router.placement.types import DecodeView, PrefillView, Snapshot, WorkerId

MUCH, LITTLE, NEW = b"much", b"little", b"new"
P, D = WorkerId("p:1", "p"), WorkerId("d:1", "d")
BOTH = Shares({MUCH: 14, LITTLE: 1}, 15)


def view(num_sequences: int, shares: Shares, max_num_seqs: int | None = 16) -> DecodeView:
    return DecodeView(
        worker=D,
        num_sequences=num_sequences,
        own_shares=shares,
        max_model_len=1000,
        local_prefill=True,
        proven=frozenset({"p"}),
        max_num_seqs=max_num_seqs,
    )


def taking(given: DecodeView) -> set[bytes]:
    return {payer for payer in (MUCH, LITTLE, NEW) if given.takes_from(payer)}


def test_the_last_place_is_for_who_has_little() -> None:
    assert taking(view(14, BOTH)) == {MUCH, LITTLE, NEW}
    assert taking(view(15, BOTH)) == {LITTLE, NEW}
    assert taking(view(16, BOTH)) == set()


def test_who_is_alone_has_all_places() -> None:
    """Nor does it matter whose sequences of other routers there are: that is not known."""
    for shares in (Shares({MUCH: 15}, 15), NO_SHARES):
        assert MUCH in taking(view(15, shares))
        assert view(15, shares).has_room


def test_who_had_some_of_late_still_counts() -> None:
    assert taking(view(15, Shares({MUCH: 15, LITTLE: 0}, 15))) == {LITTLE, NEW}


def test_of_few_places_none_is_kept() -> None:
    assert taking(view(3, Shares({MUCH: 2, LITTLE: 1}, 3), max_num_seqs=4)) == {MUCH, LITTLE, NEW}
    assert taking(view(99, BOTH, max_num_seqs=None)) == {MUCH, LITTLE, NEW}


def test_a_fair_share_of_seconds_may_be_few_sequences() -> None:
    """So the last place is kept for none of these."""
    assert taking(view(15, Shares({MUCH: 13, LITTLE: 2}, 15))) == {MUCH, LITTLE, NEW}


def test_there_is_use_in_asking_for_who_has_little() -> None:
    prefill = PrefillView(worker=P, num_pending_tokens=0, max_model_len=1000)
    busy = dataclasses.replace(prefill, has_runway=False)
    remote = dataclasses.replace(view(15, BOTH), local_prefill=False)
    for snapshot, has_room in (
        (Snapshot((prefill,), (remote,)), True),
        (Snapshot((busy,), (remote,)), False),
        (Snapshot((busy,), (view(15, BOTH),)), True),  # which computes the prompt itself
        (Snapshot((), (view(15, BOTH),), has_prefill_pool=False), True),
        (Snapshot((prefill,), (view(16, BOTH),)), False),
    ):
        assert not snapshot.has_room
        assert snapshot.has_room_for([MUCH, LITTLE]) is has_room
        assert not snapshot.has_room_for([MUCH])
        assert not snapshot.has_room_for([])


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from([MUCH, LITTLE, NEW])), max_size=60))
def test_counts_are_of_what_is_there(steps: list[tuple[int, bytes]]) -> None:
    """A sequence comes if it is not there, and else goes; one that is gone goes once more."""
    own, there = OwnSequences(), dict[int, bytes]()
    for number, payer in steps:
        if number in there:
            del there[number]
            own.remove(number)
            own.remove(number)
        else:
            there[number] = payer
            own.add(number, payer)
        shares = own.shares()
        held = list(there.values())
        assert shares.num_all == len(own) == len(held)
        assert {p: n for p, n in shares.num_of.items() if n} == {p: held.count(p) for p in held}
    own.clear()
    assert own.shares().num_all == len(own) == 0
    assert not any(own.shares().num_of.values())


def test_who_has_none_is_forgotten_after_many_others() -> None:
    own = OwnSequences()
    own.add(0, LITTLE)
    own.remove(0)
    for number in range(1, 257):
        own.add(number, MUCH)
        own.remove(number)
        own.add(1000 + number, NEW)
        own.remove(1000 + number)
        if number == 128:
            assert LITTLE in own.shares().num_of
    assert own.shares().num_of == {MUCH: 0, NEW: 0}
    own.add(1, LITTLE)
    assert own.shares().num_of[LITTLE] == 1
