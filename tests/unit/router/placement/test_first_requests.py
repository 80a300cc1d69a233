"""Who is the first on a worker is tried: what it timed at its start may have been slowed."""

import dataclasses

import pytest

from router.placement.predicted import Predicted
from router.placement.types import DecodeOnly, Objectives, Paired, Placement, Snapshot, WorkerId
from tests.unit.router.placement.predicted_world import (
    D1,
    MODEL,
    P1,
    QUERY,
    made,
    view_d,
    view_p,
)

IDLE = Snapshot((view_p(P1),), (view_d(D1),))  # its prompt takes 1.2 s there, a token 0.05
TIGHT = dataclasses.replace(QUERY, objectives=Objectives(0.8, 0.03), may_refuse=True)


def forecast_came_true(policy: Predicted, placed: Placement | None) -> None:
    assert isinstance(placed, Paired | DecodeOnly)
    assert placed.forecast is not None
    policy.came_true(placed.forecast, placed.forecast.chosen.ttft_s)


@pytest.mark.parametrize(
    "objectives", [Objectives(0.8), Objectives(None, 0.03), Objectives(0.8, 0.03)]
)
def test_the_first_is_tried_until_a_first_token_came(objectives: Objectives) -> None:
    policy, asked = made(), dataclasses.replace(TIGHT, objectives=objectives)
    for _ in range(2):  # the first may have failed
        tried = policy.place(asked, IDLE)
        assert isinstance(tried, Paired)
        assert tried.forecast is not None
        assert tried.forecast.is_probe
    forecast_came_true(policy, tried)
    assert policy.place(asked, IDLE) is None
    assert policy.foresee(asked, IDLE, 0.0) is not None


@pytest.mark.parametrize("objectives", [Objectives(0.5), Objectives(9.0, 0.02)])
def test_what_is_hopeless_is_not_tried(objectives: Objectives) -> None:
    policy = made()
    assert policy.place(dataclasses.replace(TIGHT, objectives=objectives), IDLE) is None


def test_it_is_not_tried_where_others_may_be_what_makes_it_late() -> None:
    for busy in (
        Snapshot((view_p(P1, 10),), (view_d(D1),)),
        Snapshot((view_p(P1),), (view_d(D1, 1),)),
    ):
        assert made().place(TIGHT, busy) is None


def test_one_worker_of_which_nothing_came_is_enough() -> None:
    policy = made()
    local = Snapshot((), (view_d(D1, 0, MODEL),), has_prefill_pool=False)
    forecast_came_true(policy, policy.place(TIGHT, local))
    assert policy.place(TIGHT, local) is None
    assert isinstance(policy.place(TIGHT, IDLE), Paired), "nothing came from the prefill worker"


def test_a_worker_that_started_again_has_timed_its_steps_again() -> None:
    policy = made()
    forecast_came_true(policy, policy.place(TIGHT, IDLE))
    assert policy.place(TIGHT, IDLE) is None
    policy.forget(D1)
    again = WorkerId(D1.address, "another")
    assert isinstance(policy.place(TIGHT, Snapshot((view_p(P1),), (view_d(again),))), Paired)
