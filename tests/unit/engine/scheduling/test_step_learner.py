"""The steps of an engine by their contents: what they cost is learned, each kind by itself."""

import math
from collections.abc import Sequence
from random import Random

import pytest

from diptych.engine.scheduling.step import Chunk, StepPlan
from diptych.engine.scheduling.step_learner import StepLearner, work_of
from diptych.step_model import (
    NUM_KNOWN_STEPS,
    ROW_COUNTS,
    MeasuredStep,
    StepCost,
    StepModel,
    StepWork,
    num_pairs,
)
from diptych.v1 import worker_pb2
from tests.work_count import num_calls

LAW = StepModel(StepCost(0.038, 0.0015, 4e-6), StepCost(0.115, 0.0015, 4e-6, 0.00085, 2e-7))
# What steps of so many rows took on a worker: the weights' bytes alone take what two rows take.
TOOK_S = {1: 9.7e-3, 2: 10.4e-3, 3: 12.3e-3, 4: 13.3e-3, 5: 16.1e-3, 6: 18.4e-3, 7: 19.9e-3}
TOOK_S[8] = 23.5e-3
CONVEX = StepCost(0.009, 0.0005, 1e-6, more_row_s=(0.0015, 0.0, 0.001, 0.002))


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


@pytest.mark.parametrize("seed", range(5))
def test_what_many_rows_take_is_learned_among_mostly_one_and_two(seed: int) -> None:
    learner, rng = StepLearner(), Random(seed)
    for num_rows in rng.choices((1, 2, 5, 6, 7, 8), (60, 30, 1, 1, 1, 1), k=3000):
        took_s = TOOK_S[num_rows] * rng.lognormvariate(0, 0.05)
        learner.learn(StepWork(num_rows, rng.randrange(100, 500) * num_rows), took_s)
    decode = learner.model.decode
    assert decode.expected_s(StepWork(8, 8 * 300)) == pytest.approx(TOOK_S[8], rel=0.1)
    assert decode.expected_s(StepWork(1, 300)) == pytest.approx(TOOK_S[1], rel=0.05)


@pytest.mark.parametrize("kink", [16, 64])
def test_steps_that_take_the_same_up_to_many_rows(kink: int) -> None:
    """As on a GPU. A straight line is wrong by more than a quarter."""
    learner, rng = StepLearner(), Random(kink)
    for _ in range(4000):
        num_rows = rng.randrange(1, 4 * kink)
        learner.learn(StepWork(num_rows, 300 * num_rows), flat_s(num_rows, kink))
    decode = learner.model.decode
    for num_rows in range(1, 4 * kink):
        expected_s = decode.expected_s(StepWork(num_rows, 300 * num_rows))
        assert expected_s == pytest.approx(flat_s(num_rows, kink), rel=0.22)


def flat_s(num_rows: int, kink: int) -> float:
    return 0.01 + 0.008 * max(0, num_rows - kink) / kink


@pytest.mark.parametrize("num_steps", [10_000, 100_000])
def test_what_many_rows_take_is_not_forgotten_while_there_is_one(num_steps: int) -> None:
    """100,000 steps leave nothing of what was before to a sum that fades: it must say no more,
    and not that the constant and the row are half of a step each."""
    learner = StepLearner()
    for number in range(400):
        num_rows = number % 8 + 1
        learner.learn(StepWork(num_rows, 300 * num_rows), TOOK_S[num_rows])
    for number in range(num_steps):
        learner.learn(StepWork(1, 200 + number % 200), TOOK_S[1])
    decode = learner.model.decode
    assert decode.expected_s(StepWork(8, 8 * 300)) == pytest.approx(TOOK_S[8], rel=0.1)
    assert decode.expected_s(StepWork(2, 2 * 300)) == pytest.approx(TOOK_S[2], rel=0.1)
    assert decode.expected_s(StepWork(1, 300)) == pytest.approx(TOOK_S[1], rel=0.01)


def test_of_rows_that_never_were_there_the_line_goes_on() -> None:
    learner, rng = StepLearner(), Random(2)
    for _ in range(2000):
        num_rows = rng.choice((1, 2))
        learner.learn(StepWork(num_rows, 300 * num_rows), TOOK_S[num_rows])
    decode = learner.model.decode
    assert decode.more_row_s == (0.0,) * len(ROW_COUNTS)
    one_s, two_s = (decode.expected_s(StepWork(num, 300 * num)) for num in (1, 2))
    assert (one_s, two_s) == pytest.approx((TOOK_S[1], TOOK_S[2]), rel=0.01)


def test_few_steps_are_not_relied_on() -> None:
    learner = StepLearner()
    for number in range(NUM_KNOWN_STEPS):
        assert not learner.model.decode.is_known
        learner.learn(StepWork(1, number), 0.05)
    assert learner.model.decode.is_known
    assert not learner.model.prefill.is_known


def test_trials_that_were_slowed_are_not_what_the_first_requests_take() -> None:
    """A neighbour was there all the while; the first prompts and rows are as fast as ever.

    And they stay what they are: the trials are not corrected once more as they are forgotten.
    """
    trials = [StepWork(rows, 300 * rows) for rows in range(1, 25)]
    trials += [StepWork(0, 0, 8 * num, num_pairs(0, 8 * num)) for num in range(1, 25)]
    learner = StepLearner(
        MeasuredStep(work, 2 * LAW.cost_of(work).expected_s(work)) for work in trials
    )
    for work in (StepWork.of_prompt(100, 0), StepWork(2, 500)):
        assert learner.model.cost_of(work).is_known
        expected_s = LAW.cost_of(work).expected_s(work)
        ratios = []
        for _ in range(60):
            learner.learn(work, expected_s)
            ratios.append(learner.model.cost_of(work).expected_s(work) / expected_s)
        assert all(0.95 < ratio < 1.15 for ratio in ratios[5:])


def test_steps_are_told_with_how_many_of_them_were_trials() -> None:
    trials = [MeasuredStep(StepWork(rows, 9), 0.1) for rows in range(1, 30)]
    learner = StepLearner(trials)
    for number in range(8):
        assert learner.model.is_doubted, number
        assert learner.model.decode.num_trials == 29
        learner.learn(StepWork(1, 9), 0.1)
    assert not learner.model.is_doubted
    assert learner.model.prefill.num_trials == 0
    assert not StepLearner().model.is_doubted
    assert StepModel.from_proto(learner.model.to_proto()).decode.num_trials == 29


def test_several_steps_cost_their_constant_several_times() -> None:
    work = StepWork.of_prompt(1000, 200)
    assert work == StepWork(0, 0, 800, 1000 * 1001 // 2 - 200 * 201 // 2)
    one, two = LAW.prefill.expected_s(work), LAW.prefill.expected_s(work, 2)
    assert two - one == pytest.approx(0.115)
    assert work.plus(StepWork(1, 7)) == work._replace(num_decode_rows=1, num_context_tokens=7)


def test_rows_beyond_some_counts_cost_more_in_each_step() -> None:
    def rows_s(num_rows: int, num_steps: int = 1) -> float:
        return CONVEX.expected_s(StepWork(num_rows), num_steps) - num_steps * CONVEX.fixed_s

    assert rows_s(2) == pytest.approx(0.001)
    assert rows_s(8) == pytest.approx(0.001 + 6 * 0.002)
    assert rows_s(40) == pytest.approx(0.001 + 30 * 0.002 + 8 * 0.003)
    assert rows_s(130) == pytest.approx(0.001 + 30 * 0.002 + 96 * 0.003 + 2 * 0.005)
    assert rows_s(120, 3) == pytest.approx(3 * rows_s(40))
    assert rows_s(6, 3) == pytest.approx(6 * 0.0005)


@pytest.mark.parametrize("num_there", [0, 1, 2, 5, 32, 200])
@pytest.mark.parametrize("num_more", [0.5, 1, 2, 31, 300])
def test_so_many_rows_more_fit(num_there: int, num_more: float) -> None:
    there_s = CONVEX.rows_s(num_there)
    more_s = CONVEX.rows_s(num_there + num_more) - there_s + num_more * 700 * 1e-6
    assert CONVEX.more_rows(more_s, num_there, 700) == pytest.approx(num_more)


def test_no_rows_fit_in_less_than_nothing_and_any_number_where_they_are_free() -> None:
    free = StepCost(0.009, more_row_s=(0.0, 0.002))
    assert free.more_rows(-0.001, 0, 0.0) == 0.0
    assert free.more_rows(0.004, 0, 0.0) == pytest.approx(10)
    assert free._replace(more_row_s=()).more_rows(0.0, 4, 0.0) == math.inf


@pytest.mark.parametrize("more_row_s", [(), (0.0015,), CONVEX.more_row_s])
def test_what_rows_beyond_some_counts_cost_passes_the_wire(more_row_s: tuple[float, ...]) -> None:
    """An older worker tells none: a straight line."""
    model = LAW._replace(decode=LAW.decode._replace(more_row_s=more_row_s))
    assert StepModel.from_proto(model.to_proto()) == model


def test_of_more_counts_than_are_known_here_nothing_is_taken() -> None:
    told = LAW.to_proto()
    told.decode.more_row_s[:] = [0.001] * 10_000
    known = (0.001,) * len(ROW_COUNTS)
    assert StepModel.from_proto(told).decode == LAW.decode._replace(more_row_s=known)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0, 1e300])
@pytest.mark.parametrize("place", range(len(ROW_COUNTS)))
def test_what_no_row_takes_is_not_known(wrong: float, place: int) -> None:
    told = LAW.to_proto()
    told.decode.more_row_s[:] = [wrong if at == place else 0.001 for at in range(len(ROW_COUNTS))]
    assert StepModel.from_proto(told) == LAW._replace(decode=StepCost())


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


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("prefill", ("fixed_s", "prefill_token_s", "attention_pair_s")),
        ("decode", ("fixed_s", "row_s")),
    ],
)
def test_a_step_whose_own_work_takes_no_time_is_not_known(kind: str, parts: Sequence[str]) -> None:
    """Work is shared out by what it takes: of none there is no share."""
    known = StepModel(*(cost._replace(num_steps=NUM_KNOWN_STEPS) for cost in LAW))
    told = known.to_proto()
    for name in parts:
        assert getattr(StepModel.from_proto(told), kind).is_known
        setattr(getattr(told, kind), name, 0.0)
    assert StepModel.from_proto(told) == known._replace(**{kind: StepCost()})


def test_nine_of_ten_steps_take_no_less_than_is_expected() -> None:
    """Others divide by that."""
    told = LAW.to_proto()
    told.decode.upper_ratio = 0.0
    assert StepModel.from_proto(told) == LAW._replace(decode=LAW.decode._replace(upper_ratio=1.0))


@pytest.mark.parametrize(("num_slow", "factor"), [(1, 1.5), (5, 1.2), (20, 1.1)])
@pytest.mark.parametrize("count", ROW_COUNTS)
def test_a_few_slow_steps_of_many_rows_are_not_what_more_take(
    count: int, num_slow: int, factor: float
) -> None:
    """A line that goes on beyond the count, by steps of one row more and of half as many more."""

    def took_s(num_rows: int) -> float:
        return 0.02 + 0.0005 * num_rows

    for num_rows in (count + 1, count * 3 // 2):
        learner, rng = StepLearner(), Random(count)
        for _ in range(1000):
            usual = rng.randrange(1, count + 1)
            learner.learn(StepWork(usual), took_s(usual) * rng.lognormvariate(0, 0.03))
        for _ in range(num_slow):
            learner.learn(StepWork(num_rows), factor * took_s(num_rows))
        for _ in range(1000):
            usual = rng.randrange(1, count + 1)
            learner.learn(StepWork(usual), took_s(usual) * rng.lognormvariate(0, 0.03))
        expected_s = learner.model.decode.expected_s(StepWork(2 * count))
        assert expected_s == pytest.approx(took_s(2 * count), rel=0.25)


def test_of_prompts_no_rows_cost_more() -> None:
    told = LAW.to_proto()
    told.prefill.more_row_s[:] = [0.001]
    assert StepModel.from_proto(told) == LAW


def test_between_two_steps_what_was_learned_is_put_together_once() -> None:
    learner = StepLearner()
    for work in (StepWork(3, 900), StepWork(0, 0, 64, num_pairs(0, 64))):
        learner.learn(work, 0.05)
        learned = learner.model
        assert num_calls(lambda: learner.model) == 2
        assert learner.model is learned
    learner.learn(StepWork(3, 903), 0.06)
    assert learner.model.decode.num_steps == 2, "it follows each step"
