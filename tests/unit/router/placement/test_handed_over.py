"""What is foretold of the gap in which a sequence is handed over, and learned of it."""

import pytest

from diptych.block_needs import ShippedBytes
from router.placement.placement import DecodeOnly, Forecast, Paired
from router.placement.query import Objectives
from router.placement.views import DecodeView, Snapshot
from tests.told_caches import holds
from tests.unit.router.placement.predicted_world import (
    D1,
    KEYS,
    MODEL,
    P1,
    P2,
    QUERY,
    made,
    place,
    view_d,
    view_p,
)


def test_what_a_hand_off_takes_beside_its_pull_is_learned() -> None:
    """A tenth of a second; one that took a minute changes little, and of answers that stay where
    their prompt was computed nothing is said.
    """
    policy, snapshot = made(), Snapshot((view_p(P1),), (view_d(D1),))

    def foretold() -> Forecast:
        chosen = policy.place(QUERY, snapshot)
        assert isinstance(chosen, Paired)
        assert chosen.forecast is not None
        return chosen.forecast

    before = foretold().chosen
    assert before.gap_s == pytest.approx(before.tpot_s), "nobody is there to wait for"
    for _ in range(200):
        policy.went_on(foretold(), before.gap_s + 0.1)
    learned = foretold().chosen
    assert learned.gap_s == pytest.approx(before.gap_s + 0.1, rel=0.001)
    assert learned.seconds == pytest.approx(before.seconds + 0.1, rel=0.001)
    assert (learned.ttft_s, learned.tpot_s) == (before.ttft_s, before.tpot_s)
    policy.went_on(foretold(), 60.0)
    assert foretold().chosen.gap_s < 1.1 * (before.gap_s + 0.1)
    alone = policy.place(QUERY, Snapshot(decode=(view_d(D1, model=MODEL),), has_prefill_pool=False))
    assert isinstance(alone, DecodeOnly)
    assert alone.forecast is not None
    assert alone.forecast.chosen.gap_s == 0.0
    for _ in range(300):
        policy.went_on(foretold(), before.gap_s)
    assert foretold().chosen.gap_s == pytest.approx(before.gap_s)


def test_a_short_answer_whose_hand_off_takes_longer_than_its_pace_allows_stays() -> None:
    """Its four gaps are 0.05 s, and may be 0.08: one may take 0.02 s more, not half a second."""
    short = QUERY._replace(num_max_tokens=1005, objectives=Objectives(60.0, 0.08))
    snapshot = Snapshot((view_p(P1),), (view_d(D1, model=MODEL),))
    policy = made()
    holds(policy, P1, KEYS)
    first = policy.place(short, snapshot)
    assert isinstance(first, Paired)
    assert first.forecast is not None
    for took_s, kind in ((0.02, Paired), (0.5, DecodeOnly)):
        for _ in range(31):
            policy.went_on(first.forecast, first.forecast.chosen.gap_s + took_s)
        assert isinstance(policy.place(short, snapshot), kind)


@pytest.mark.parametrize(
    ("decode", "wanted"),
    [
        (view_d(D1, model=MODEL), Objectives(60.0, 0.08)),
        (view_d(D1, local_prefill=False), Objectives(None, 0.08)),
    ],
    ids=["it may stay", "it may not"],
)
def test_a_hand_off_that_looks_too_slow_is_tried_again_after_a_while(
    decode: DecodeView, wanted: Objectives
) -> None:
    """Or else nothing would ever tell that it is fast again."""
    asked = QUERY._replace(num_max_tokens=1005, objectives=wanted, may_refuse=True, now_s=100.0)
    policy, snapshot = made(), Snapshot((view_p(P1),), (decode,))
    holds(policy, P1, KEYS)
    first = policy.place(asked, snapshot)
    assert isinstance(first, Paired)
    assert first.forecast is not None
    for _ in range(16):
        policy.went_on(first.forecast, first.forecast.chosen.gap_s + 0.5)
    for later_s in (0.0, 10.0, 29.0):
        later = asked._replace(now_s=100.0 + later_s)
        assert not isinstance(policy.place(later, snapshot), Paired)
    again = policy.place(asked._replace(now_s=131.0), snapshot)
    assert isinstance(again, Paired)
    assert again.forecast is not None
    policy.went_on(again.forecast, again.forecast.chosen.gap_s + 0.5)
    assert isinstance(policy.place(asked._replace(now_s=132.0), snapshot), Paired), (
        "it takes as many as before"
    )


def test_the_worker_that_has_a_prefix_is_not_taken_to_be_slower_at_handing_it_over() -> None:
    """It has long been pulled when the little is computed that was missing."""
    rates = {"p1": 1e7, "p2": 1e7}
    decode = view_d(D1, shipped=ShippedBytes.even(1000.0), bytes_per_s=rates)
    policy, snapshot = made(), Snapshot((view_p(P1), view_p(P2)), (decode,))
    holds(policy, P1, KEYS)
    short = QUERY._replace(num_max_tokens=1011, objectives=Objectives(60.0, 0.06))
    chosen = policy.place(short, snapshot)
    assert chosen == Paired(P1, D1)
    assert isinstance(chosen, Paired)
    assert chosen.forecast is not None
    best = chosen.forecast.chosen
    assert best.gap_s - best.tpot_s == pytest.approx(8 * 1000.0 / 1e7)


def test_of_two_links_the_slow_one_makes_short_answers_slow() -> None:
    rates = {"p1": 1e6, "p2": 1e8}
    decode = view_d(D1, shipped=ShippedBytes.even(1000.0), bytes_per_s=rates)
    short = QUERY._replace(num_max_tokens=1011)
    chosen = place((view_p(P1), view_p(P2)), (decode,), Objectives(60.0, 0.06), short)
    assert isinstance(chosen, Paired)
    assert chosen.forecast is not None
    by_source = {each.prefill: each for each in chosen.forecast.candidates}
    assert by_source[P1].num_own_missed > 0.9 > 0.2 > by_source[P2].num_own_missed
