"""Where workers say how long they have been at their prompts, time passes in what is foretold."""

import dataclasses
from typing import Any

import pytest

from diptych.step_model import StepWork
from router.placement import candidates
from router.placement.forecast import of_prefill
from router.placement.placement import DecodeOnly, Forecast, Paired
from router.placement.query import Objectives, Query
from router.placement.views import EngineView, Snapshot, WorkerId
from tests.unit.router.placement.predicted_world import (
    D1,
    D2,
    MODEL,
    P1,
    P2,
    QUERY,
    made,
    view_d,
    view_p,
)

NOW_S = 500.0
ASKED = QUERY._replace(now_s=NOW_S)


def at_work(since_s: float, num_tokens: int = 1000) -> EngineView:
    """It had begun with its prompts when it told, so long ago."""
    work = StepWork.of_prompt(num_tokens, 0)
    return EngineView(
        model=MODEL,
        max_batched_tokens=512,
        work=work,
        prefill_age_s=0.0,
        heard_s=NOW_S - since_s,
    )


@pytest.mark.parametrize("sooner", [P1, P2])
def test_of_like_queues_the_one_that_began_first_is_over_first(sooner: WorkerId) -> None:
    prefills = tuple(
        dataclasses.replace(view_p(each, 1000), engine=at_work(0.4 if each is sooner else 0.1))
        for each in (P1, P2)
    )
    placement = made().place(ASKED, Snapshot(prefills, (view_d(D1),)))
    assert isinstance(placement, Paired)
    assert placement.prefill is sooner


@pytest.mark.parametrize("sooner", [D1, D2])
def test_so_it_is_where_prompts_are_computed_by_who_decodes(sooner: WorkerId) -> None:
    decodes = tuple(
        view_d(each, engine=at_work(0.4 if each is sooner else 0.1)) for each in (D1, D2)
    )
    placement = made().place(ASKED, Snapshot((), decodes, has_prefill_pool=False))
    assert isinstance(placement, DecodeOnly)
    assert placement.decode is sooner
    assert placement.forecast is not None
    assert placement.forecast.chosen.ttft_s < 60.0


@pytest.mark.parametrize("sooner", [D1, D2])
def test_who_is_handed_over_goes_where_prompts_are_over_first(sooner: WorkerId) -> None:
    decodes = tuple(
        view_d(each, local_prefill=False, engine=at_work(0.9 if each is sooner else 0.0, 3000))
        for each in (D1, D2)
    )
    brief = ASKED._replace(num_tokens=100, num_max_tokens=110, block_keys=())
    placement = made().place(brief, Snapshot((view_p(P1),), decodes))
    assert isinstance(placement, Paired)
    assert placement.decode is sooner


def test_a_worker_that_hangs_in_a_step_attracts_nobody() -> None:
    hung = dataclasses.replace(at_work(0.3, 4000), prefill_age_s=30.0)
    busy = dataclasses.replace(view_p(P2, 500), engine=at_work(0.0, 500))
    prefills = (dataclasses.replace(view_p(P1, 4000), engine=hung), busy)
    placement = made().place(ASKED, Snapshot(prefills, (view_d(D1),)))
    assert isinstance(placement, Paired)
    assert placement.prefill == P2


def test_what_was_weighed_for_a_place_is_of_use_a_moment_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rolled: list[Any] = []

    def counted(view: Any, *args: Any) -> Any:
        rolled.append(view)
        return of_prefill(view, *args)

    monkeypatch.setattr(candidates, "of_prefill", counted)
    policy, snapshot = made(), Snapshot((view_p(P1),), (view_d(D1, 20),))
    asked = ASKED._replace(objectives=Objectives(3.0, 0.1), may_refuse=True)
    assert policy.place(asked, snapshot) is None
    num_weighed = len(rolled)
    later = asked._replace(now_s=NOW_S + 0.001)
    assert policy.foresee(later, snapshot, 0.0) is None
    assert len(rolled) == num_weighed


def test_what_first_tokens_take_beside_steps_is_the_median_of_what_the_latest_took() -> None:
    """However many of them were on their way, foretold by what was known before."""
    policy, snapshot = made(), Snapshot((view_p(P1),), (view_d(D1),))

    def foretold(query: Query = ASKED) -> Forecast:
        placement = policy.place(query, snapshot)
        assert isinstance(placement, Paired)
        assert placement.forecast is not None
        return placement.forecast

    steps_s = foretold().chosen.ttft_s
    for turn in range(20):
        on_their_way = [foretold() for _ in range(16)]
        for number, forecast in enumerate(on_their_way):
            is_stray = number % 5 == 0
            policy.came_true(forecast, steps_s + (4.0 if is_stray else 0.1))
        if turn > 1:
            assert foretold().chosen.ttft_s == pytest.approx(steps_s + 0.1)


def test_one_slow_first_token_of_a_new_router_bars_nobody() -> None:
    policy, snapshot = made(), Snapshot((view_p(P1),), (view_d(D1),))
    placement = policy.place(ASKED, snapshot)
    assert isinstance(placement, Paired)
    assert placement.forecast is not None
    policy.came_true(placement.forecast, 60.0)
    again = policy.place(ASKED, snapshot)
    assert isinstance(again, Paired)
    assert again.forecast == placement.forecast
