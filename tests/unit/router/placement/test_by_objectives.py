"""Requests with objectives are placed by what is foretold, all others by load."""

from dataclasses import replace

import pytest

from diptych.step_model import StepCost, StepModel
from router.placement.by_objectives import ByObjectives
from router.placement.cache_index import CacheIndex
from router.placement.guard import LOOK_S
from router.placement.least_loaded import LeastLoaded
from router.placement.placement import Paired
from router.placement.promises import Promise, promised
from router.placement.query import EndedRequest, Objectives, Query
from router.placement.views import Snapshot
from tests.unit.router.placement.predicted_world import D1, MODEL, P1, P2, QUERY, view_d, view_p

SLOW = StepModel(StepCost(), StepCost(5.0, 0.0, 0.0, 0.001, 0.0, 1.2, 100))
# By load the idle one is next; but it takes longer than the other with all that waits there.
SNAPSHOT = Snapshot(
    (view_p(P1, 0, SLOW), view_p(P2, 600)),
    (view_d(D1, local_prefill=False),),
    has_prefill_pool=True,
)
SOON = QUERY._replace(objectives=Objectives(ttft_s=60.0), may_refuse=True)
NEVER = QUERY._replace(objectives=Objectives(ttft_s=0.001), may_refuse=True)
PACED = QUERY._replace(objectives=Objectives(tpot_s=0.0001), may_refuse=True)


def made() -> ByObjectives:
    plain = LeastLoaded(
        CacheIndex(100), local_below_tokens=0, allow_local=True, allow_recompute=True
    )
    return ByObjectives(plain, lambda: 0.5)


def test_who_wants_nothing_is_placed_by_load() -> None:
    policy = made()
    placement = policy.place(QUERY._replace(may_refuse=True), SNAPSHOT)
    assert placement == Paired(P1, D1)
    assert isinstance(placement, Paired)
    assert placement.forecast is None
    assert policy.foresee(QUERY._replace(may_refuse=True), SNAPSHOT, 1e6) is None


def test_a_deadline_refuses_what_cannot_begin_before_it_and_changes_nothing_else() -> None:
    policy = made()
    far, near = (Objectives(ttft_s, None, 5.0, True) for ttft_s in (60.0, 0.001))
    query = QUERY._replace(objectives=far, may_refuse=True)
    placement = policy.place(query, SNAPSHOT)
    assert placement == Paired(P1, D1), "by load"
    assert isinstance(placement, Paired)
    assert placement.forecast is None
    assert not policy.has_declined
    assert policy.foresee(query, SNAPSHOT, 0.0) is None
    hopeless = query._replace(objectives=near)
    assert (policy.place(hopeless, SNAPSHOT), policy.has_declined) == (None, True)
    assert policy.place(hopeless._replace(may_refuse=False), SNAPSHOT) == Paired(P1, D1)
    assert not policy.has_declined
    lost = policy.foresee(hopeless, SNAPSHOT, 0.0)
    assert lost is not None
    assert "deadline: the answer is wanted within 5.000 s, of which 0.001 are left" in lost.what
    assert "its first token foretold in" in lost.what
    before = len(policy.guard._seen)
    policy.ended_as(EndedRequest(1.0, 2.0, 500, far, 0.5, 0.04))
    assert len(policy.guard._seen) == before


def test_of_many_whose_deadlines_look_lost_one_is_tried_each_so_often() -> None:
    """Else a forecast that is wrong would be right for ever."""
    policy = made()
    late = QUERY._replace(objectives=Objectives(0.001, None, 5.0, True), may_refuse=True)
    placed = []
    for number in range(70):
        if policy.place(late, SNAPSHOT) is not None:
            placed.append(number)
        else:
            assert policy.has_declined
            assert policy.foresee(late, SNAPSHOT, 0.0) is not None
    assert placed == [16, 33, 50, 67]


def test_who_wants_something_may_be_computed_anywhere() -> None:
    """All candidates are weighed; by load a decode worker computes no long prompt."""
    local = replace(SNAPSHOT, decode=(view_d(D1),))
    assert made().may_be_local(SOON, local)
    assert not made().may_be_local(QUERY, local)


def test_who_wants_something_is_placed_by_what_is_foretold() -> None:
    placement = made().place(SOON, SNAPSHOT)
    assert placement == Paired(P2, D1)
    assert isinstance(placement, Paired)
    assert placement.forecast is not None


@pytest.mark.parametrize("query", [NEVER, PACED])
def test_what_will_miss_its_objectives_is_not_placed(query: Query) -> None:
    policy = made()
    assert policy.place(query, SNAPSHOT) is None
    assert policy.has_declined
    assert policy.foresee(query, SNAPSHOT, 0.0) is not None
    assert policy.place(QUERY, SNAPSHOT) is not None
    assert not policy.has_declined, "that was another one"


def test_what_was_promised_counts_whoever_runs_there() -> None:
    """Of two that run one was promised a pace: who wants the same is kept out by it."""
    policy, pace_s = made(), 0.046
    view = view_d(D1, 2, MODEL, local_prefill=False)
    snapshot = replace(SNAPSHOT, decode=(view,))
    wants = QUERY._replace(objectives=Objectives(ttft_s=60.0, tpot_s=pace_s), may_refuse=True)
    before = policy.place(wants._replace(may_refuse=False), snapshot)
    assert isinstance(before, Paired)
    assert before.forecast is not None
    told = replace(view, promised=promised([Promise(), Promise(pace_s, 100)]))
    after = policy.place(wants._replace(may_refuse=False), replace(snapshot, decode=(told,)))
    assert isinstance(after, Paired)
    assert after.forecast is not None
    assert after.forecast.chosen.num_barring > before.forecast.chosen.num_barring


def test_the_guard_hears_of_those_that_want_something() -> None:
    policy = made()
    policy.ended_as(EndedRequest(1.0, 1.0 + 9 * LOOK_S, 10))
    assert not policy.guard.is_due, "of these nothing was foretold"
    policy.ended_as(EndedRequest(1.0, 1.0 + 9 * LOOK_S, 10, Objectives(tpot_s=1.0), 1.0, 0.5))
    assert policy.guard.is_due


def test_what_came_true_is_learned_behind_the_guard() -> None:
    policy = made()
    placement = policy.place(SOON, SNAPSHOT)
    assert isinstance(placement, Paired)
    before = placement.forecast
    assert before is not None
    for _ in range(100):
        policy.came_true(before, before.chosen.ttft_s + 1.0)
        policy.went_on(before, before.chosen.gap_s + 2.0)
    placement = policy.place(SOON, SNAPSHOT)
    assert isinstance(placement, Paired)
    after = placement.forecast
    assert after is not None
    assert after.overhead_s == pytest.approx(before.overhead_s + 1.0)
    assert after.handoff_overhead_s == pytest.approx(before.handoff_overhead_s + 2.0)
