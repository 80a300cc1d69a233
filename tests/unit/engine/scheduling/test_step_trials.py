"""What is timed before the first request is what real steps have, and tells what those take."""

import itertools

import pytest

from diptych.engine.scheduling.step_learner import StepLearner
from diptych.engine.scheduling.step_trials import (
    NUM_PASSES,
    StepTrial,
    decode_trials,
    prompt_trials,
)
from diptych.step_model import MeasuredStep, StepCost, StepWork, num_pairs

DECODE = StepCost(0.006, 0.0005, 5e-7, more_row_s=(0.001, 0.0003, 0.0004, 0.0))
PREFILL = StepCost(0.009, 0.0008, 3e-6, 0.0009, 3e-7)


@pytest.mark.parametrize(
    ("max_context", "max_batched_tokens", "max_num_seqs"),
    list(itertools.product((1, 5, 16, 300, 1024, 9999), (1, 3, 16, 512, 9999), (1, 3, 64, 500))),
)
def test_trials_are_within_what_a_step_may_have(
    max_context: int, max_batched_tokens: int, max_num_seqs: int
) -> None:
    prompts = prompt_trials(
        max_context=max_context, max_batched_tokens=max_batched_tokens, max_num_seqs=max_num_seqs
    )
    for trial in prompts:
        assert trial.num_prompt_tokens >= 2
        assert trial.num_prompt_tokens + trial.num_rows <= max_batched_tokens
        assert trial.prompt_start + trial.num_prompt_tokens <= max_context
        assert trial.num_rows < max_num_seqs
        assert trial.context_len <= max_context
    assert bool(prompts) is (min(max_context, max_batched_tokens) > 1)
    if prompts:
        longest = max(trial.num_prompt_tokens for trial in prompts)
        assert longest == min(max_context, max_batched_tokens, 2048)
    decodes = decode_trials(max_context=max_context, max_num_seqs=max_num_seqs)
    for trial in decodes:
        assert trial.num_prompt_tokens == 0
        assert 1 <= trial.num_rows <= max_num_seqs
        assert 1 <= trial.context_len <= max_context


def test_their_work_is_as_steps_count_it() -> None:
    assert StepTrial(3, 20).work == StepWork(3, 60)
    assert StepTrial(2, 7, 16, 100).work == StepWork(2, 14, 16, num_pairs(100, 116))


def test_the_first_request_finds_both_kinds_known() -> None:
    prompts = prompt_trials(max_context=4096, max_batched_tokens=2048, max_num_seqs=64)
    decodes = decode_trials(max_context=4096, max_num_seqs=64)
    measured = [MeasuredStep(each.work, PREFILL.expected_s(each.work)) for each in prompts]
    measured += [MeasuredStep(each.work, DECODE.expected_s(each.work)) for each in decodes]
    model = StepLearner(NUM_PASSES * measured).model
    assert model.decode.is_known
    assert model.prefill.is_known
    for num_rows, context_len in itertools.product(
        (1, 2, 4, 7, 8, 11, 16, 32, 60), (16, 400, 1000)
    ):
        work = StepWork(num_rows, num_rows * context_len)
        assert model.decode.expected_s(work) == pytest.approx(DECODE.expected_s(work), rel=0.06)
    for num_tokens, start, num_rows in itertools.product((8, 100, 512, 2048), (0, 900), (0, 4)):
        pairs = num_pairs(start, start + num_tokens)
        work = StepWork(num_rows, 300 * num_rows, num_tokens, pairs)
        assert model.prefill.expected_s(work) == pytest.approx(PREFILL.expected_s(work), rel=0.05)


def test_prompts_that_wait_for_the_weights_do_not_make_long_ones_cheap() -> None:
    """As on a GPU: up to some 200 tokens they take the same. 0.14 of it was foretold for 2,048."""
    trials = prompt_trials(max_context=4096, max_batched_tokens=2048, max_num_seqs=64)
    measured = [MeasuredStep(each.work, roofline_s(each.work)) for each in NUM_PASSES * trials]
    prefill = StepLearner(measured).model.prefill
    for num_tokens in (512, 1024, 2048):
        work = StepWork.of_prompt(num_tokens, 0)
        assert prefill.expected_s(work) == pytest.approx(roofline_s(work), rel=0.25)


def roofline_s(work: StepWork) -> float:
    return max(0.006, 27e-6 * work.num_prefill_tokens) + 1e-9 * work.num_attention_pairs
