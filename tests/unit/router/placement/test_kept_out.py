"""How many prompts an answer keeps out of the worker on which it is decoded."""

import pytest

from router.placement.forecast import Span
from router.placement.loss import num_kept_out

PACE = Span(0.02, 0.024)  # s a token, expected and in nine of ten cases


def test_one_whose_pace_bears_a_prompt_keeps_none_out() -> None:
    assert num_kept_out(1.0, PACE, 0.1, 100) == pytest.approx(0.0)  # 0.03 s with one


def test_one_whose_pace_bears_none_keeps_one_out_at_the_most() -> None:
    assert num_kept_out(1.0, PACE, 0.022, 100) == pytest.approx(1.0, abs=0.01)
    assert num_kept_out(1.0, PACE, 0.03, 1000) == pytest.approx(0.0, abs=0.01), "it hardly shows"


def test_a_short_answer_is_soon_out_of_the_way() -> None:
    assert num_kept_out(1.0, PACE, 0.025, 5) == pytest.approx(0.1**2)


@pytest.mark.parametrize(("prompt_s", "tpot_s"), [(0.0, 0.001), (1.0, None)])
def test_nothing_is_known_of_others_or_wanted(prompt_s: float, tpot_s: float | None) -> None:
    assert num_kept_out(prompt_s, PACE, tpot_s, 100) == 0.0
