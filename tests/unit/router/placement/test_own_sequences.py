"""Whose sequences of a router are on a decode worker, and who may have its last place."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from router.placement.claim import Asked
from router.placement.own_sequences import NO_SHARES, OwnSequences, Shares
from router.placement.views import DecodeView, PrefillView, Snapshot, WorkerId

MUCH, LITTLE, NEW = b"much", b"little", b"new"
P, D = WorkerId("p:1", "p"), WorkerId("d:1", "d")


def shares(**counts: int) -> Shares:
    own, number = OwnSequences(), 0
    for name, num in counts.items():
        for _ in range(max(1, num)):
            own.add(number := number + 1, name.encode())
        if not num:
            own.remove(number)
    return own.shares()


BOTH = shares(much=14, little=1)


def view(num_sequences: int, own_shares: Shares, max_num_seqs: int | None = 16) -> DecodeView:
    return DecodeView(
        worker=D,
        num_sequences=num_sequences,
        own_shares=own_shares,
        max_model_len=1000,
        local_prefill=True,
        proven=frozenset({"p"}),
        max_num_seqs=max_num_seqs,
    )


def taking(given: DecodeView) -> set[bytes]:
    return {payer for payer in (MUCH, LITTLE, NEW) if given.takes_from(payer)}


ALL = {MUCH, LITTLE, NEW}


def test_the_last_place_is_not_for_who_has_most_of_them() -> None:
    assert taking(view(14, BOTH)) == ALL
    assert taking(view(15, BOTH)) == {LITTLE, NEW}
    assert not view(15, BOTH).has_room
    assert taking(view(16, BOTH)) == set()


def test_who_is_alone_has_all_places() -> None:
    for alone in (shares(much=15), NO_SHARES):
        assert taking(view(15, alone)) == ALL
        assert view(15, alone).has_room


def test_where_other_routers_have_as_many_all_take_the_last() -> None:
    """Else one that knows of nobody else would have all that this one leaves."""
    assert taking(view(15, shares(much=8, little=0))) == ALL


def test_who_had_some_of_late_still_counts() -> None:
    assert taking(view(15, shares(much=15, little=0))) == {LITTLE, NEW}


def test_of_few_places_none_is_kept() -> None:
    assert taking(view(7, shares(much=6, little=0), max_num_seqs=8)) == ALL
    assert taking(view(99, BOTH, max_num_seqs=None)) == ALL


def test_a_fair_share_of_seconds_may_be_few_sequences() -> None:
    """So the last place is kept for none of these."""
    assert taking(view(15, shares(much=13, little=2))) == ALL


def test_a_batch_does_not_count() -> None:
    """It leaves for others, so no place is kept for it, nor from it."""
    own = OwnSequences()
    for number in range(15):
        own.add(number, None if number % 2 else MUCH)
    assert len(own) == 15
    assert own.shares() == shares(much=8)


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
        assert snapshot.has_room_for([Asked(MUCH), Asked(LITTLE)]) is has_room
        assert not snapshot.has_room_for([Asked(MUCH)])
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
        held = list(there.values())
        assert len(own) == len(held)
        assert own.shares().num_main == max(map(held.count, held), default=0)
        if held:
            assert held.count(own.shares().main) == own.shares().num_main
    own.clear()
    assert len(own) == own.shares().num_main == 0


def test_who_has_none_is_forgotten_after_many_others() -> None:
    own = OwnSequences()
    own.add(0, LITTLE)
    own.remove(0)
    for number in range(1, 300):
        own.add(number, MUCH)
        assert own.shares().has_little is (number <= 256), number
