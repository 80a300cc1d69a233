"""What those lose that were promised a pace where one more is placed."""

import pytest

from router.placement.forecast import DecodeForecast, Span
from router.placement.loss import Bystanders
from router.placement.promises import Promised
from tests.work_count import num_calls

_PACE = DecodeForecast(2, Span(0.05, 0.07), Span(0.06, 0.08))


def _beside(*paces_s: float) -> Bystanders:
    promised = Promised(_PACE.num_rows, tuple((pace_s, 64, 1.0) for pace_s in paces_s))
    return Bystanders(_PACE, 0.2, promised)


def test_only_those_bar_it_by_their_own_pace_that_want_tokens_no_faster() -> None:
    """Others bar it by its pace, as far as they would with that."""
    missed = _beside(0.06, 0.08).toll(0.07, 50).missed
    alike, looser = _beside(0.06).toll(0.06, 50).missed, _beside(0.08).toll(0.07, 50).missed
    assert alike.num_all == alike.num_barring
    assert looser.num_all == looser.num_barring
    assert missed.num_all == pytest.approx(alike.num_all + looser.num_all)
    by_its_pace = _beside(0.07).toll(0.07, 50).missed
    assert missed.num_barring == pytest.approx(by_its_pace.num_all + looser.num_all)


def test_what_a_pace_loses_is_worked_out_once_where_it_bars_by_that() -> None:
    alike, tighter = _beside(0.07), _beside(0.06)
    for_alike = num_calls(lambda: alike.toll(0.07, 50))
    assert for_alike < num_calls(lambda: tighter.toll(0.07, 50)), "of these it is worked out twice"
