"""What of a router's own prompts was in what a worker told, and is computed since."""

import math

import pytest

from diptych.step_model import NUM_KNOWN_STEPS, StepCost, StepModel, StepWork
from router.placement.forecast import computes_none_s
from router.placement.prefill_load import OwnPrompts, PrefillLoad
from router.placement.runway import Runway
from router.placement.views import EngineView

PREFILL = StepCost(0.1, prefill_token_s=0.001, num_steps=NUM_KNOWN_STEPS)
HEARD_S = 70.0
RUNWAY = Runway(1000, 2.0)


def engine(
    num_tokens: int = 1000, age_s: float | None = 0.2, cost: StepCost = PREFILL
) -> EngineView:
    """It computes 500 tokens a step, in 0.6 s."""
    return EngineView(
        model=StepModel(StepCost(0.04, num_steps=NUM_KNOWN_STEPS), cost),
        max_batched_tokens=500,
        work=StepWork(num_prefill_tokens=num_tokens),
        prefill_age_s=age_s,
        heard_s=HEARD_S,
    )


def test_what_is_gone_before_its_step_can_end_was_not_in_what_it_told() -> None:
    load = PrefillLoad(RUNWAY)
    load.told(427, 480.0, OwnPrompts(832), computes_none_s=0.4)
    load.loaded(OwnPrompts(427), since_s=0.001)
    assert load.num_computed_tokens == 0
    load.loaded(OwnPrompts(627, num_sent_tokens=200), since_s=0.1)
    assert load.num_computed_tokens == 0
    load.loaded(OwnPrompts(300, num_sent_tokens=200), since_s=0.9)
    assert load.num_computed_tokens == 327
    load.told(100, 480.0, OwnPrompts(300), computes_none_s=0.4)
    assert load.num_computed_tokens == 0


@pytest.mark.parametrize("since_s", [0.001, 0.4, math.inf])
def test_where_nothing_is_known_of_its_step_all_that_is_gone_is_computed(since_s: float) -> None:
    load = PrefillLoad(RUNWAY)
    load.told(1000, 480.0, OwnPrompts(832))
    load.loaded(OwnPrompts(427), since_s)
    assert load.num_computed_tokens == 405


@pytest.mark.parametrize(
    ("said", "none_s"),
    [
        (engine(), 0.2),
        (engine(age_s=0.0), 0.3),
        (engine(100, age_s=0.0), 0.1),
        (engine(age_s=0.7), 0.0),  # longer than such a step takes
        (engine(age_s=None), 0.0),
        (engine(cost=StepCost()), 0.0),
        (None, 0.0),
    ],
)
def test_none_is_computed_in_half_of_what_is_left_of_its_step(
    said: EngineView | None, none_s: float
) -> None:
    assert computes_none_s(said) == pytest.approx(none_s)
