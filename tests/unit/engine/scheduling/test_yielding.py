"""Prompts that yield wait while others have tokens to compute, in short steps, but not for ever."""

import pytest

from diptych.engine.scheduling.scheduler import Scheduler
from diptych.engine.scheduling.sequence import Sequence
from diptych.engine.scheduling.yielding import MOST_PASSED_S, QUIET_S, ShortSteps
from diptych.step_model import NUM_KNOWN_STEPS, StepCost, StepModel, StepWork
from router.placement.spare import BATCH_YIELDS_S
from tests.unit.engine.scheduling.steps import (
    make_scheduler,
    make_sequence,
    sequences_of,
    start_local,
    step,
)

WORK = StepWork.of_prompt(1000, 0)
PER_TOKEN_S = 0.001


def add(scheduler: Scheduler, num_tokens: int, token_id: int, *, yields: bool) -> Sequence:
    seq = make_sequence([token_id] * num_tokens, prefill_only=True)
    seq.yields = yields
    scheduler.add_prefill(seq)
    return seq


def lengths(
    scheduler: Scheduler, max_yielding_tokens: int | None = None, now_s: float = 0.0
) -> dict[Sequence, int]:
    """One step: how many tokens of each sequence it computes."""
    _, updates = step(scheduler, max_yielding_tokens, now_s)
    return {update.sequence: update.num_step_tokens for update in updates}


def model_of(constant_s: float, num_steps: int = NUM_KNOWN_STEPS) -> StepModel:
    return StepModel(
        StepCost(), StepCost(constant_s, prefill_token_s=PER_TOKEN_S, num_steps=num_steps)
    )


def after_others(at_s: float = 0.0) -> ShortSteps:
    short = ShortSteps(512)
    short.admitted(make_sequence([1]), at_s)
    return short


def test_a_prompt_that_comes_later_is_computed_first_and_alone() -> None:
    scheduler = make_scheduler(64, max_num_seqs=8, max_batched_tokens=16)
    of_batch = add(scheduler, 40, 1, yields=True)
    assert lengths(scheduler) == {of_batch: 16}
    other = add(scheduler, 20, 2, yields=False)
    assert lengths(scheduler) == {other: 16}
    assert lengths(scheduler) == {other: 4}
    assert lengths(scheduler) == {of_batch: 16}


def test_prompts_that_wait_come_by_class_and_then_by_arrival() -> None:
    scheduler = make_scheduler(32, max_num_seqs=2, max_batched_tokens=16)
    batch = [add(scheduler, 8, number, yields=True) for number in (1, 2)]
    others = [add(scheduler, 8, number, yields=False) for number in (3, 4)]
    assert sequences_of(step(scheduler)[1]) == others
    assert sequences_of(step(scheduler)[1]) == batch


def test_single_tokens_go_on_beside_prompts_of_others() -> None:
    scheduler = make_scheduler(64, max_num_seqs=8, max_batched_tokens=16)
    seq = make_sequence([1] * 4)
    seq.yields = True
    start_local(scheduler, seq)
    step(scheduler)
    other = add(scheduler, 20, 2, yields=False)
    assert lengths(scheduler) == {seq: 1, other: 12}


def test_they_share_a_step_of_so_many_tokens() -> None:
    scheduler = make_scheduler(64, max_num_seqs=8, max_batched_tokens=16)
    first, second = add(scheduler, 10, 1, yields=True), add(scheduler, 30, 2, yields=True)
    assert lengths(scheduler, max_yielding_tokens=12) == {first: 10}
    assert lengths(scheduler, max_yielding_tokens=12) == {second: 12}
    assert lengths(scheduler) == {second: 16}


def test_a_long_one_gets_no_more_of_what_is_left() -> None:
    scheduler = make_scheduler(64, max_num_seqs=8, max_batched_tokens=16)
    long = add(scheduler, 40, 1, yields=True)
    assert lengths(scheduler, max_yielding_tokens=8) == {long: 8}


def test_others_are_not_held_to_it() -> None:
    scheduler = make_scheduler(64, max_num_seqs=8, max_batched_tokens=16)
    other = add(scheduler, 16, 1, yields=False)
    assert lengths(scheduler, max_yielding_tokens=4) == {other: 16}


def test_whoever_was_passed_by_for_long_goes_like_any_other() -> None:
    scheduler = make_scheduler(64, max_num_seqs=8, max_batched_tokens=16)
    of_batch = add(scheduler, 16, 1, yields=True)
    others = [add(scheduler, 16, 2 + number, yields=False) for number in range(4)]
    assert lengths(scheduler, now_s=5.0) == {others[0]: 16}
    assert lengths(scheduler, now_s=4.9 + MOST_PASSED_S) == {others[1]: 16}
    assert lengths(scheduler, now_s=5.0 + MOST_PASSED_S) == {others[2]: 16}
    assert lengths(scheduler, now_s=5.1 + MOST_PASSED_S) == {of_batch: 16}
    assert of_batch.has_aged


def test_only_who_is_passed_by_on_end_ages() -> None:
    scheduler = make_scheduler(64, max_num_seqs=8, max_batched_tokens=16)
    of_batch = add(scheduler, 40, 1, yields=True)
    for now_s in (0.0, MOST_PASSED_S):
        other = add(scheduler, 16, 2 + int(now_s), yields=False)
        assert lengths(scheduler, now_s=now_s) == {other: 16}
        assert lengths(scheduler, now_s=now_s) == {of_batch: 16}
    assert not of_batch.has_aged


def test_a_worker_passes_by_as_long_as_a_router() -> None:
    assert MOST_PASSED_S == BATCH_YIELDS_S


def test_steps_are_as_large_as_any_where_nobody_else_comes() -> None:
    short = ShortSteps(512)
    seq = make_sequence([1])
    seq.yields = True
    short.admitted(seq, 0.0)
    assert short.max_tokens(WORK, model_of(0.0), 0.0) is None
    assert after_others(3.0).max_tokens(WORK, model_of(0.0), 2.9 + QUIET_S) is not None
    assert after_others(3.0).max_tokens(WORK, model_of(0.0), 3.0 + QUIET_S) is None


@pytest.mark.parametrize(
    ("model", "num_tokens"),
    [
        (model_of(0.0), 50),  # 50 ms
        (model_of(0.004), 46),
        (model_of(0.04), 360),  # a tenth of 400 ms is the constant
        (model_of(0.1), 512),  # as many as a step can have
        (model_of(0.12), None),  # all that there is
        (model_of(0.0, num_steps=0), 128),  # a quarter, while nothing is known
    ],
)
def test_a_step_is_short_but_mostly_of_use(model: StepModel, num_tokens: int | None) -> None:
    assert after_others().max_tokens(WORK, model, 1.0) == num_tokens


def test_single_tokens_in_the_step_count_as_its_constant() -> None:
    model = StepModel(StepCost(), StepCost(0.0, 0.002, 0.0, PER_TOKEN_S, 0.0, 1.0, NUM_KNOWN_STEPS))
    beside = WORK._replace(num_decode_rows=5)
    assert after_others().max_tokens(beside, model, 1.0) == 90


def test_without_prompts_there_is_nothing_to_bound() -> None:
    assert after_others().max_tokens(StepWork(num_decode_rows=3), model_of(0.0), 1.0) is None
