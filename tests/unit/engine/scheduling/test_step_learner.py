"""The steps of an engine by their contents: what they cost is learned, each kind by itself."""

import math
from random import Random

import pytest

from diptych.engine.scheduling.step import Chunk, StepPlan
from diptych.engine.scheduling.step_learner import StepLearner, work_of
from diptych.step_model import NUM_KNOWN_STEPS, StepCost, StepModel, StepWork, num_pairs
from diptych.v1 import worker_pb2

LAW = StepModel(StepCost(0.038, 0.0015, 4e-6), StepCost(0.115, 0.0015, 4e-6, 0.00085, 2e-7))


def chunk(start: int, num_tokens: int) -> Chunk:
    return Chunk(token_ids=(1,) * num_tokens, start=start, block_table=(), sample=None)


def random_work(rng: Random, *, with_prompt: bool) -> StepWork:
    num_rows = rng.randrange(0 if with_prompt else 1, 17)
    num_context = sum(rng.randrange(50, 1500) for _ in range(num_rows))
    if not with_prompt:
        return StepWork(num_rows, num_context)
    start, num_tokens = rng.randrange(1500), rng.choice((64, 128, 256, 512))
    pairs = num_pairs(start, start + num_tokens)
    return StepWork(num_rows, num_context, num_tokens, pairs)


def test_a_step_is_its_rows_and_its_parts_of_prompts() -> None:
    plan = StepPlan(chunks=(chunk(9, 1), chunk(0, 3), chunk(4, 2), chunk(29, 1)))
    assert work_of(plan) == StepWork(2, 10 + 30, 5, (1 + 2 + 3) + (5 + 6))


def test_each_kind_is_learned_by_itself() -> None:
    """As many single tokens as ever may come between two prompts: those are not forgotten."""
    learner, rng = StepLearner(), Random(11)
    for _ in range(400):
        work = random_work(rng, with_prompt=True)
        learner.learn(work, LAW.prefill.expected_s(work))
    for _ in range(4000):
        work = random_work(rng, with_prompt=False)
        learner.learn(work, LAW.decode.expected_s(work))
    model = learner.model
    for with_prompt in (False, True):
        work = random_work(rng, with_prompt=with_prompt)
        expected_s = model.cost_of(work).expected_s(work)
        assert expected_s == pytest.approx(LAW.cost_of(work).expected_s(work), rel=0.02)
    assert (model.decode.num_steps, model.prefill.num_steps) == (4000, 400)


def test_few_steps_are_not_relied_on() -> None:
    learner = StepLearner()
    for number in range(NUM_KNOWN_STEPS):
        assert not learner.model.decode.is_known
        learner.learn(StepWork(1, number), 0.05)
    assert learner.model.decode.is_known
    assert not learner.model.prefill.is_known


def test_several_steps_cost_their_constant_several_times() -> None:
    work = StepWork.of_prompt(1000, 200)
    assert work == StepWork(0, 0, 800, 1000 * 1001 // 2 - 200 * 201 // 2)
    one, two = LAW.prefill.expected_s(work), LAW.prefill.expected_s(work, 2)
    assert two - one == pytest.approx(0.115)
    assert work.plus(StepWork(1, 7)) == work._replace(num_decode_rows=1, num_context_tokens=7)


def test_it_passes_the_wire_unchanged() -> None:
    assert StepModel.from_proto(LAW.to_proto()) == LAW
    silent = StepModel.from_proto(worker_pb2.WorkerState().step_model)
    assert not silent.decode.is_known
    assert not silent.prefill.is_known


@pytest.mark.parametrize("name", ["fixed_s", "row_s", "attention_pair_s", "upper_ratio"])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0, 1e300])
def test_what_no_step_takes_is_not_known(name: str, wrong: float) -> None:
    told = LAW.to_proto()
    setattr(told.decode, name, wrong)
    assert StepModel.from_proto(told) == LAW._replace(decode=StepCost())


def test_nine_of_ten_steps_take_no_less_than_is_expected() -> None:
    """Others divide by that."""
    told = LAW.to_proto()
    told.decode.upper_ratio = 0.0
    assert StepModel.from_proto(told) == LAW._replace(decode=LAW.decode._replace(upper_ratio=1.0))
