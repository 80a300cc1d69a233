"""Who is the first on a worker is tried: what it timed at its start may have been slowed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.step_model import NUM_KNOWN_STEPS, StepModel
from router.placement.placement import Paired
from router.placement.query import Objectives
from router.placement.views import DecodeView, Snapshot, WorkerId
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
TIGHT = QUERY._replace(objectives=Objectives(0.8, 0.03), may_refuse=True)


@pytest.mark.parametrize(
    "objectives", [Objectives(0.8), Objectives(None, 0.03), Objectives(0.8, 0.03)]
)
def test_the_first_is_tried(objectives: Objectives) -> None:
    asked = TIGHT._replace(objectives=objectives)
    tried = made().place(asked, IDLE)
    assert isinstance(tried, Paired)
    assert tried.forecast is not None
    assert not tried.forecast.is_probe, "it says nothing of what first tokens take beside steps"


@pytest.mark.parametrize("objectives", [Objectives(0.5), Objectives(9.0, 0.02)])
def test_what_is_hopeless_is_not_tried(objectives: Objectives) -> None:
    policy, asked = made(), TIGHT._replace(objectives=objectives)
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
        (told(24, 3, 4), told(24, 0, 99), Objectives(0.8), True),
        (told(24, 4, 4), told(24, 0, 0), Objectives(0.8), False),
        (told(24, 99), told(24, 3, 4), Objectives(None, 0.03), True),
        (told(24, 0), told(24, 4, 4), Objectives(None, 0.03), False),
        (told(24, 99), told(24, 0, 0), Objectives(0.8, 0.03), False),
        (told(10), told(24, 99, 99), Objectives(0.8), False),
        (MODEL, MODEL, Objectives(0.8), False),
    ],
    ids=[
        "few prompts",
        "steps enough",
        "few tokens",
        "steps enough, to decode",
        "the worker that makes it too late is not new",
        "too few trials to be judged by",
        "no trials",
    ],
)
def test_it_is_tried_until_requests_have_shown_what_steps_take(
    computing: StepModel, decoding: StepModel, objectives: Objectives, *, is_tried: bool
) -> None:
    asked = TIGHT._replace(objectives=objectives)
    known = decoding_only(D2, 1, told(24, 99, 99))
    other = view_p(P2, 50_000, told(24, 99, 99))
    snapshot = Snapshot((view_p(P1, 0, computing), other), (decoding_only(D1, 0, decoding), known))
    assert (made().place(asked, snapshot) is not None) is is_tried


@given(ttft_s=st.floats(0.3, 3.0), tpot_s=st.floats(0.01, 0.2))
def test_who_wants_less_is_not_refused_where_others_are_tried(ttft_s: float, tpot_s: float) -> None:
    asked = TIGHT._replace(objectives=Objectives(ttft_s, tpot_s))
    is_placed = made().place(asked, IDLE) is not None
    assert is_placed is (ttft_s >= 1.2 / 2 and tpot_s >= 0.052 / 2)


def test_who_comes_beside_the_first_waits_rather_than_being_refused() -> None:
    """What it is too slow for is in doubt still."""
    beside = Snapshot((view_p(P1, 1000, NEW),), (decoding_only(D1, 1, NEW),))
    policy = made()
    for objectives in (Objectives(1.3), Objectives(None, 0.03)):
        asked = TIGHT._replace(objectives=objectives)
        assert policy.place(asked, beside) is None
        assert policy.foresee(asked, beside, 0.0) is None
    hopeless = TIGHT._replace(objectives=Objectives(None, 0.02))
    assert policy.place(hopeless, beside) is None
    assert policy.foresee(hopeless, beside, 0.0) is not None


@pytest.mark.parametrize("is_prefill_new", [False, True])
def test_a_pace_that_no_worker_makes_is_refused_however_new_others_are(
    *, is_prefill_new: bool
) -> None:
    """It would wait for as long as anything may, as nobody comes to a worker of whom none asks."""
    served = told(24, 99, 99)
    snapshot = Snapshot(
        (view_p(P1, 0, NEW if is_prefill_new else served),), (decoding_only(D1, 0, served),)
    )
    asked = TIGHT._replace(objectives=Objectives(9.0, 0.03))
    policy = made()
    assert policy.place(asked, snapshot) is None
    assert policy.foresee(asked, snapshot, 0.0) is not None


def test_what_first_tokens_take_beside_steps_no_worker_timed() -> None:
    policy = made()
    first = policy.place(QUERY, IDLE)
    assert isinstance(first, Paired)
    assert first.forecast is not None
    for _ in range(31):
        policy.came_true(first.forecast, first.forecast.chosen.ttft_s + 5.0)
    for ttft_s, is_tried in ((5.5, False), (5.8, True)):
        asked = TIGHT._replace(objectives=Objectives(ttft_s))
        assert (policy.place(asked, IDLE) is not None) is is_tried


def test_of_several_one_that_may_be_in_time_is_taken() -> None:
    served = decoding_only(D2, 0, told(24, 99, 99))
    placed = made().place(
        TIGHT._replace(objectives=Objectives(9.0, 0.03)),
        Snapshot((view_p(P1, 0, NEW),), (served, decoding_only(D1, 0, NEW))),
    )
    assert isinstance(placed, Paired)
    assert placed.decode == D1
