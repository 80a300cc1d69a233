"""Who is the first on a worker is tried: what it timed at its start may have been slowed."""

import dataclasses

import pytest

from diptych.step_model import NUM_KNOWN_STEPS, StepModel
from router.placement.types import DecodeView, Objectives, Paired, Snapshot, WorkerId
from tests.unit.router.placement.predicted_world import (
    D1,
    D2,
    MODEL,
    P1,
    QUERY,
    made,
    view_d,
    view_p,
)


def told(num_trials: int, num_prefill: int = 0, num_decode: int = 0) -> StepModel:
    """Of that many trials of either kind, and some steps of requests."""
    prefill, decode = (
        cost._replace(num_trials=num_trials, num_steps=num_trials + num)
        for cost, num in ((MODEL.prefill, num_prefill), (MODEL.decode, num_decode))
    )
    return StepModel(decode, prefill)


def decoding_only(worker: WorkerId, num_rows: int, model: StepModel) -> DecodeView:
    return view_d(worker, num_rows, model, local_prefill=False)


NEW = told(NUM_KNOWN_STEPS)
IDLE = Snapshot(
    (view_p(P1, 0, NEW),), (decoding_only(D1, 0, NEW),)
)  # 1.2 s for its prompt; 0.05 a token
TIGHT = dataclasses.replace(QUERY, objectives=Objectives(0.8, 0.03), may_refuse=True)


@pytest.mark.parametrize(
    "objectives", [Objectives(0.8), Objectives(None, 0.03), Objectives(0.8, 0.03)]
)
def test_the_first_is_tried(objectives: Objectives) -> None:
    asked = dataclasses.replace(TIGHT, objectives=objectives)
    tried = made().place(asked, IDLE)
    assert isinstance(tried, Paired)
    assert tried.forecast is not None
    assert tried.forecast.is_probe


@pytest.mark.parametrize("objectives", [Objectives(0.5), Objectives(9.0, 0.02)])
def test_what_is_hopeless_is_not_tried(objectives: Objectives) -> None:
    policy, asked = made(), dataclasses.replace(TIGHT, objectives=objectives)
    assert policy.place(asked, IDLE) is None
    assert policy.foresee(asked, IDLE, 0.0) is not None


def test_it_is_not_tried_where_others_may_be_what_makes_it_late() -> None:
    for busy in (
        Snapshot((view_p(P1, 10, NEW),), (decoding_only(D1, 0, NEW),)),
        Snapshot((view_p(P1, 0, NEW),), (decoding_only(D1, 1, NEW),)),
    ):
        assert made().place(TIGHT, busy) is None


@pytest.mark.parametrize(
    ("computing", "decoding", "objectives", "is_tried"),
    [
        (told(24, 7), told(24, 0, 99), Objectives(0.8), True),
        (told(24, 8), told(24, 0, 0), Objectives(0.8), False),
        (told(24, 99), told(24, 0, 7), Objectives(None, 0.03), True),
        (told(24, 0), told(24, 0, 8), Objectives(None, 0.03), False),
        (told(24, 99), told(24, 0, 0), Objectives(0.8, 0.03), False),
        (MODEL, MODEL, Objectives(0.8), False),
    ],
    ids=[
        "few prompts",
        "prompts enough",
        "few tokens",
        "tokens enough",
        "prompts enough, and too late for it",
        "no trials",
    ],
)
def test_it_is_tried_until_requests_have_shown_what_steps_take(
    computing: StepModel, decoding: StepModel, objectives: Objectives, *, is_tried: bool
) -> None:
    """Each of the two by the kind of steps that it is asked for."""
    asked = dataclasses.replace(TIGHT, objectives=objectives)
    snapshot = Snapshot((view_p(P1, 0, computing),), (decoding_only(D1, 0, decoding),))
    assert (made().place(asked, snapshot) is not None) is is_tried


def test_of_several_one_that_may_be_in_time_is_taken() -> None:
    served = decoding_only(D2, 0, told(24, 99, 99))
    placed = made().place(
        dataclasses.replace(TIGHT, objectives=Objectives(9.0, 0.03)),
        Snapshot((view_p(P1, 0, NEW),), (served, decoding_only(D1, 0, NEW))),
    )
    assert isinstance(placed, Paired)
    assert placed.decode == D1
