"""Which of a router's promises a worker has not told of yet."""

import pytest

from diptych.paced import Paced
from router.placement.answer_length import AnswerLength, Likely
from router.placement.promises import (
    NOTHING_PROMISED,
    OwnPromises,
    Promise,
    Promised,
    promised,
)

PACED = Promise(0.02, 40)


def told_of(sequence_id: int, owner: str = "r1") -> Paced:
    return Paced(0.02, 0.5, 10, 20, owner, sequence_id)


def made(*sequence_ids: int) -> OwnPromises:
    own = OwnPromises("r1")
    for sequence_id in sequence_ids:
        own.placed(sequence_id, PACED)
    return own


def test_several_come_to_their_tightest_pace_and_their_lengths() -> None:
    several = [Promise(), Promise(0.03, 40), Promise(0.02, 63), Promise(0.05, 0)]
    assert promised(several) == Promised(4, ((0.03, 32, 1), (0.02, 32, 1), (0.05, 0, 1)))
    assert promised([PACED, PACED]) == Promised(2, ((0.02, 32, 2),))
    assert promised([]) == NOTHING_PROMISED


def test_a_promise_counts_until_the_worker_tells_of_who_decodes() -> None:
    own = made(1, 2)
    assert own.promised == promised([PACED] * 2)
    own.drew(1)
    assert own.promised == promised([PACED] * 2), "it has not been told"
    own.told([])
    assert own.promised == promised([PACED]), "the other one is at its prompt"
    own.told([])
    assert own.promised == promised([PACED])


def test_who_is_listed_decodes_though_no_token_has_come_yet() -> None:
    own = made(1)
    own.told([told_of(1, "r2")])
    assert own.promised == promised([PACED]), "another router's is called the same"
    own.told([told_of(1)])
    assert own.promised == NOTHING_PROMISED


def test_of_who_has_ended_since_nothing_is_left() -> None:
    own = made(1, 2)
    own.drew(1)
    own.drew(2)
    listed = told_of(1), told_of(2), told_of(2, "r2"), told_of(9), told_of(0, "")
    own.told(listed)
    assert own.still_there(listed) == (listed[0], listed[1], listed[2], listed[4])
    own.over(1)
    own.over(1)
    assert own.num_ended == 1
    assert own.still_there(listed) == (listed[1], listed[2], listed[4])
    own.told([told_of(2)])
    assert own.num_ended == 0


@pytest.mark.parametrize("has_drawn", [True, False])
def test_who_ends_before_it_was_told_of_is_none_of_those_that_were(has_drawn: bool) -> None:
    own = made(1)
    if has_drawn:
        own.drew(1)
    own.over(1)
    own.told([])
    assert own.num_ended == 0
    assert own.promised == NOTHING_PROMISED
    own.drew(1)
    own.told([])
    assert own.promised == NOTHING_PROMISED, "it is not there"


def test_with_the_stream_all_are_over() -> None:
    own = made(1, 2)
    own.drew(1)
    own.told([])
    own.clear()
    assert own.num_ended == 0, "who told so may be gone"
    assert own.promised == NOTHING_PROMISED
    assert own.still_there([told_of(1)]) == ()


def test_of_ours_each_length_that_is_as_likely_is_a_way_to_go_on() -> None:
    answer = AnswerLength([Likely(15, 0.5), Likely(90, 0.5)])
    own = OwnPromises("r1")
    own.placed(1, Promise(0.02, 52, answer))
    assert own.promised == Promised(1, ((0.02, 8, 0.5), (0.02, 64, 0.5)))
    told = told_of(1)._replace(num_more=41)
    own.told([told])
    first, second = own.still_there([told])
    assert (first.num_more, first.share) == (4, 0.5)
    assert (second.num_more, second.share) == (79, 0.5)
    assert own.still_there([told_of(1, "r2")]) == (told_of(1, "r2"),)
