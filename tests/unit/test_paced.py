"""What workers tell of sequences that were promised a pace."""

import math
from typing import Any

import pytest

from diptych.paced import MOST_TOLD, Paced, from_proto, tightest, to_proto
from diptych.v1 import worker_pb2
from tests.work_count import num_calls


def test_what_is_left_is_for_all_tokens_that_are_to_come() -> None:
    """60 tokens at 20 ms are to take 1.2 s; 0.9 of these are gone, and 20 tokens are to come."""
    paced = Paced.expected(0.02, 0.9, 40, num_to_come=20)
    assert paced.left_s(0.02) == pytest.approx(0.3)
    assert paced.spare_s(0.01) == pytest.approx(0.1)
    assert paced.left_s(0.03) == pytest.approx(0.9), "with a wider pace there is more"


@pytest.mark.parametrize("num_expected", [-30, 0, 5])
def test_who_draws_more_than_was_expected_draws_a_fourth_more(num_expected: int) -> None:
    assert Paced.expected(0.02, 0.1, 0, 0).num_more == 1
    assert Paced.expected(0.02, 0.9, 40, num_expected).num_more == 11


def test_how_likely_it_goes_on_so_is_not_told() -> None:
    one = Paced(0.02, 0.5, 10, 20, "r1", 4, share=0.5)
    (told,) = to_proto([one])
    assert from_proto([told]) == (one._replace(share=1.0),)


def test_of_many_those_are_told_that_can_lose_the_least_and_keep_their_pace() -> None:
    """A prompt takes so many seconds of each: a long answer has less for each token, and more."""
    short = [Paced(0.02, 0.1 * i, 100, 100) for i in range(18)]  # the later, the less is left
    long = [Paced(0.02, 2.0, 100, 1000)] * 20
    lost = [Paced(0.02, 3.3, 100, 100)] * 5
    told = tightest([*long, *short, *lost], token_s=0.01)
    assert told == short[: -MOST_TOLD - 1 : -1]
    loose = [Paced(0.05, 1.0, 100, 100)] * 9
    told = tightest([*loose, *short], token_s=0.01)
    assert told == short[:-5:-1] + loose[:4], "a tighter pace does not hide others"
    assert tightest(lost, token_s=0.01) == []
    assert tightest(lost, token_s=0.005) == lost
    assert len(tightest(lost * 9, token_s=0.0)) == MOST_TOLD, "steps are not known yet"


def test_what_is_told_is_what_is_heard() -> None:
    paced = [Paced(0.02, 0.5, 10, 20), Paced(0.05, 0.0, 0, 1)]
    assert from_proto(to_proto(paced)) == tuple(paced)


@pytest.mark.parametrize(
    "wrong",
    [
        {"tpot_s": math.nan},
        {"tpot_s": math.inf},
        {"tpot_s": 0.0},
        {"tpot_s": 5e-324},
        {"tpot_s": -1.0},
        {"decoding_s": math.nan},
        {"decoding_s": -0.1},
        {"decoding_s": math.inf},
        {"num_drawn": 2**32 - 1},
        {"num_more": 0},
        {"num_more": 2**32 - 1},
    ],
)
def test_what_cannot_be_is_not_heard(wrong: dict[str, Any]) -> None:
    good: dict[str, Any] = {"tpot_s": 0.02, "decoding_s": 0.5, "num_drawn": 10, "num_more": 20}
    told = [worker_pb2.PacedSequence(**good), worker_pb2.PacedSequence(**{**good, **wrong})]
    assert from_proto(told) == (Paced(0.02, 0.5, 10, 20),)


def test_of_a_worker_that_tells_of_more_no_more_are_heard() -> None:
    told = to_proto([Paced(0.02, 0.5, 10, 20)] * (MOST_TOLD + 9))
    assert len(from_proto(told)) == MOST_TOLD


def test_seconds_to_spare_are_those_beside_all_tokens_to_come() -> None:
    short, long = Paced(0.02, 2.0, 100, 100), Paced(0.02, 11.1, 100, 1000)  # 1 s and 0.9 s
    assert tightest([short, long], token_s=0.01) == [long, short]


def test_who_has_less_than_four_fifths_of_what_tokens_take_has_missed() -> None:
    kept, lost = Paced(0.02, 4.0 - 0.81, 100, 100), Paced(0.02, 4.0 - 0.79, 100, 100)
    assert tightest([kept, lost], token_s=0.01) == [kept]


def test_what_is_told_of_one_is_read_in_one_go() -> None:
    """Of a busy worker it is the most of each message of Watch."""
    told = to_proto([Paced(0.02, 0.5, 10, 20, "r1", number) for number in range(MOST_TOLD)])
    per_sequence = (num_calls(lambda: from_proto(told)) - num_calls(lambda: from_proto([]))) / 8
    assert per_sequence == 2, "made, and looked at"
