"""What the guard is told of placements, and what is refused while it has a fixed regime."""

from dataclasses import replace
from heapq import heappop, heappush

import pytest

from router.placement.guard import Guard, Rates, Regime
from router.placement.placement import DecodeOnly, Forecast, Outlook, Paired, Why
from router.placement.query import EndedRequest, Objectives, Query
from router.placement.views import Snapshot, WorkerId
from tests.unit.router.placement.predicted_world import D1, D2, MODEL, P1, QUERY, view_d, view_p
from tests.unit.router.placement.test_guard import LATE, made, snapshot

GOALS = Objectives(2.0, 0.1, 2.0)
ASKED = Query(num_tokens=500, num_max_tokens=540, objectives=GOALS, may_refuse=True)


def test_the_guard_is_told_what_is_missed_and_what_of_that_is_a_requests_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = made()
    outlook = Outlook(None, D1, 0.5, 0.05, 0.7, 9.0, num_own_missed=0.2)
    chosen = DecodeOnly(D1, Why.CHOICE, 0, Forecast(outlook, (outlook,)))
    monkeypatch.setattr(policy._predicted, "place", lambda query, snapshot: chosen)
    assert policy.place(QUERY._replace(now_s=12.0), snapshot(1.0)) == chosen
    foretold = [(each.at_s, each.num_missed, each.num_own) for each in policy.guard._foretold]
    assert foretold == [(12.0, 0.7, 0.2)]


def test_how_long_an_answer_was_counts_among_requests_of_late() -> None:
    policy = made()
    query = QUERY._replace(num_output_tokens=30)
    placement = policy.place(query, Snapshot((view_p(P1),), (view_d(D1),)))
    assert isinstance(placement, Paired)
    assert placement.forecast is not None
    policy.answered(placement.forecast, 70)
    assert policy._predicted._parting._mix.num_output_tokens == 70


def turns_in_bursts(rate: float, lasts_s: float, foretold: float) -> list[Regime]:
    """Of every two minutes the last thirty seconds bring more than can be served: each request
    then misses one objective, of which so many were foretold. An answer ends after ``lasts_s``;
    one of ten is short.
    """
    guard, turns = Guard(), list[Regime]()
    came: list[tuple[float, EndedRequest]] = []  # by when it ends
    rates = Rates(num_prefill=40, num_decode=40, tokens_per_s=1000.0, step_s=0.04)
    for number in range(int(rate * 400.0)):
        now_s = 1000.0 + number / rate
        is_late = (number / rate) % 120.0 > 90.0
        guard.foretold(is_late * foretold, is_late * foretold, now_s)
        ttft_s = 3.0 if is_late else 0.5
        ends_s = now_s + (lasts_s if number % 10 else 3.0)
        heappush(came, (ends_s, EndedRequest(now_s, ends_s, 200, GOALS, ttft_s, 0.05)))
        while came[0][0] <= now_s:
            guard.ended(heappop(came)[1])
        if guard.is_due and guard.look(rates):
            turns.append(guard.regime)
    return turns


@pytest.mark.parametrize(("rate", "lasts_s"), [(4.0, 30.0), (13.0, 30.0), (64.0, 30.0)])
def test_a_burst_that_came_as_foretold_is_not_doubted_when_its_answers_end(
    rate: float, lasts_s: float
) -> None:
    """They end among placements of which nothing bad is foretold any more."""
    assert turns_in_bursts(rate, lasts_s, 1.0) == []
    assert Regime.APART in turns_in_bursts(rate, lasts_s, 0.0)


def test_in_a_fixed_regime_a_full_cluster_is_foreseen_as_if_it_had_room() -> None:
    """Else nothing would be found for it, and nobody would be refused."""
    policy = made()
    policy.guard.regime = Regime.APART
    full = replace(LATE, decode=tuple(replace(v, max_num_seqs=0) for v in LATE.decode))
    assert policy.place(ASKED, full) is None
    assert policy.foresee(ASKED, full, 0.0) is not None


def test_of_workers_without_room_those_count_too_that_would_be_sooner() -> None:
    """One that has room is late; one that has none now would be in time once it has."""
    policy = made()
    late = view_d(D1, 0, MODEL)
    assert late.engine is not None
    work = late.engine.work._replace(num_prefill_tokens=20_000)
    late = replace(late, engine=replace(late.engine, work=work))
    told = Snapshot((), (late,), has_prefill_pool=False)
    assert policy.place(ASKED, told) is None
    assert policy.foresee(ASKED, told, 0.0) is not None
    soon = view_d(D2, 1, MODEL)
    told = replace(told, decode=(late, replace(soon, max_num_seqs=1)))
    assert policy.place(ASKED, told) is None
    assert policy.foresee(ASKED, told, 0.0) is None, "it is waited for"


def test_halves_that_cannot_pull_from_each_other_are_not_apart() -> None:
    """Pairs are within two zones; by their names a zone each would be a half."""
    zones = {"a1": "a2", "a2": "a1", "b1": "b2", "b2": "b1"}
    workers = [WorkerId(f"{name}:1", name) for name in zones]
    prefill = tuple(replace(view_p(worker), tokens_per_s=1000.0) for worker in workers)
    decode = tuple(
        replace(view_d(worker), proven=frozenset({zones[worker.incarnation]}), step_s=0.04)
        for worker in workers
    )
    apart = Snapshot(prefill, decode)
    rates = Rates.of(apart)
    assert rates is not None
    assert (rates.num_decode, rates.num_apart) == (4, 0)
    policy = made()
    policy.guard.regime = Regime.APART
    assert policy.place(Query(num_tokens=500, num_max_tokens=540), apart) is not None


def test_a_request_that_one_half_could_never_take_goes_anywhere() -> None:
    told = snapshot(1.0)
    both = tuple(replace(view_p(worker), tokens_per_s=1000.0) for worker in (D1, D2))
    long, short = (replace(view, proven=frozenset({"d1", "d2"})) for view in told.decode)
    policy = made()
    policy.guard.regime = Regime.APART
    apart = Snapshot(both, (long, replace(short, max_model_len=500)))
    placement = policy.place(Query(num_tokens=500, num_max_tokens=540), apart)
    assert isinstance(placement, DecodeOnly)
    assert placement.decode == D1
