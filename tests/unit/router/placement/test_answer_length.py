"""How an answer may go on that has so many tokens."""

import pytest

from diptych.paced import Paced
from router.placement.answer_length import AnswerLength, Likely


def test_its_length_is_that_of_all_on_average() -> None:
    assert AnswerLength([Likely(10, 0.75), Likely(50, 0.25)]).num_tokens == 20
    assert AnswerLength([Likely(0.2, 3.0)]).num_tokens == 1


@pytest.mark.parametrize(
    ("num_drawn", "halves"),
    [
        (0, (10, 70)),
        (9, (1, 61)),
        (10, (50, 70)),
        (75, (5,)),
        (79, (1,)),
        (80, (21,)),
        (200, (51,)),
    ],
)
def test_the_shorter_half_of_those_that_are_left_and_the_longer_one(
    num_drawn: int, halves: tuple[int, ...]
) -> None:
    answer = AnswerLength([Likely(10, 0.5), Likely(60, 0.25), Likely(80, 0.25)])
    assert answer.halves_after(num_drawn) == halves


def test_a_length_that_is_likelier_than_not_is_in_both_halves() -> None:
    answer = AnswerLength([Likely(10, 0.75), Likely(110, 0.25)])
    assert answer.halves == (10, 60)


def test_each_way_is_as_likely_as_the_other_and_the_rest_is_as_it_was_told() -> None:
    told = Paced(0.02, 0.5, 9, 42, "r1", 4)
    answer = AnswerLength([Likely(15, 0.5), Likely(90, 0.5)])
    assert answer.ways(told) == (
        told._replace(num_more=5, share=0.5),
        told._replace(num_more=80, share=0.5),
    )
    assert AnswerLength([Likely(15, 1.0)]).ways(told) == (told._replace(num_more=5),)


def test_who_lost_its_place_and_begins_anew_has_what_it_had_before() -> None:
    """Of 900 of a thousand tokens nothing is to come again."""
    answer = AnswerLength([Likely(1000, 1.0)])
    (way,) = answer.ways(Paced(0.05, 0.05, 1, 99, "r1", 4))
    assert way.num_more == 99
