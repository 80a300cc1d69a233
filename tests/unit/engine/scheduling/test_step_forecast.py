"""How long a step may take: a long one is not hung, and a hung one is not waited for long."""

from random import Random

import pytest

from diptych.engine.scheduling.step_forecast import forecast_s
from diptych.engine.scheduling.step_learner import StepLearner
from diptych.engine.scheduling.step_timing import StepTiming
from diptych.step_model import (
    NUM_KNOWN_STEPS,
    MeasuredStep,
    StepCost,
    StepModel,
    StepWork,
    num_pairs,
)

TOKEN_S, PAIR_S = 4.3e-3, 1.18e-6  # Qwen3-0.6B on two cores
MEASURED = [MeasuredStep(StepWork(num_prefill_tokens=15), 15 * TOKEN_S)]
UNKNOWN = StepModel()


class Worker:
    """What a worker learns of steps whose cost is a law."""

    def __init__(self) -> None:
        self.learner, self.timing = StepLearner(), StepTiming(MEASURED)
        self._noise = Random(5)

    def run(self, work: StepWork) -> None:
        took_s = law_s(work) * self._noise.lognormvariate(0, 0.05)
        self.learner.learn(work, took_s)
        self.timing.record(work.num_prefill_tokens, work.num_decode_rows, took_s)

    def forecast_s(self, work: StepWork) -> float:
        return forecast_s(work, self.learner.model, self.timing)

    def run_short_prompts(self, num_steps: int) -> None:
        for _ in range(num_steps):
            sizes = [self._noise.randint(20, 300) for _ in range(self._noise.randint(1, 10))]
            self.run(StepWork(0, 0, sum(sizes), sum(num_pairs(0, size) for size in sizes)))


def law_s(work: StepWork) -> float:
    num_tokens = work.num_prefill_tokens + work.num_decode_rows
    return num_tokens * TOKEN_S + work.num_attention_pairs * PAIR_S


def behind(num_cached: int, num_tokens: int) -> StepWork:
    return StepWork(0, 0, num_tokens, num_pairs(num_cached, num_cached + num_tokens))


@pytest.mark.parametrize("num_steps", [60, 600, 6000])
def test_a_turn_behind_a_long_document_is_expected_to_take_long(num_steps: int) -> None:
    """Although all steps since then were short prompts."""
    worker = Worker()
    for begin in range(0, 16 * 1024, 1024):
        worker.run(behind(begin, 1024))
    worker.run_short_prompts(num_steps)
    turn = behind(16 * 1024, 1000)
    assert 0.8 < worker.forecast_s(turn) / law_s(turn) < 3.0


@pytest.mark.parametrize("num_steps", [0, 3, 60, 6000])
def test_so_is_one_behind_a_longer_document_than_any_before(num_steps: int) -> None:
    worker = Worker()
    worker.run_short_prompts(num_steps)
    turn = behind(16 * 1024, 1000)
    assert 0.8 < worker.forecast_s(turn) / law_s(turn) < 10.0


def test_a_prompt_on_a_worker_that_only_decoded_is_not_so_many_single_tokens() -> None:
    """Those read all weights for each."""
    timing = StepTiming([MeasuredStep(StepWork(num_prefill_tokens=15), 0.012)])
    for _ in range(400):
        timing.record(0, 1, 0.008)
    assert forecast_s(behind(0, 8192), UNKNOWN, timing) < 15.0


def test_a_prompt_on_a_worker_whose_single_tokens_have_no_slope_is_no_single_token() -> None:
    timing, noise = StepTiming([MeasuredStep(StepWork(num_prefill_tokens=15), 0.5)]), Random(1)
    for number in range(400):
        timing.record(0, 1 + number // 50 % 2, 0.25 * noise.uniform(0.97, 1.03))
    assert forecast_s(behind(0, 512), UNKNOWN, timing) > 10.0


def test_what_nine_of_ten_do_not_exceed_is_what_it_takes() -> None:
    decode = StepCost(0.02, 0.001, 1e-6, upper_ratio=1.5, num_steps=NUM_KNOWN_STEPS)
    prefill = StepCost(0.1, 0.001, 1e-6, 0.002, 1e-5, upper_ratio=2.0, num_steps=NUM_KNOWN_STEPS)
    model, timing = StepModel(decode, prefill), StepTiming(MEASURED)
    work = StepWork(3, 3000)
    assert forecast_s(work, model, timing) == pytest.approx(1.5 * 0.026)
    work = StepWork(3, 3000, 100, 5000)
    assert forecast_s(work, model, timing) == pytest.approx(2.0 * (0.106 + 0.2 + 0.05))


def test_nothing_is_expected_where_nothing_is_known() -> None:
    assert forecast_s(behind(0, 512), UNKNOWN, StepTiming()) == 0.0
    assert forecast_s(StepWork(), UNKNOWN, StepTiming(MEASURED)) == MEASURED[0].duration_s


def test_a_step_measured_before_the_first_predicts_it() -> None:
    timing = StepTiming([MeasuredStep(StepWork(num_prefill_tokens=16), 0.02)])
    assert timing.predict_s(8) == pytest.approx(0.02)
    assert timing.predict_s(160) == pytest.approx(0.2)
    assert (timing.prefill_tokens_per_s, timing.decode_step_s) == (0, 0)


def test_prediction_is_a_line_once_two_sizes_were_seen() -> None:
    timing = StepTiming()
    assert timing.predict_s(100) == 0
    timing.record(0, 4, 0.010)
    assert timing.predict_s(2) == pytest.approx(0.010)
    assert timing.predict_s(8) == pytest.approx(0.020)
    for _ in range(20):
        timing.record(500, 4, 0.010 + 500 * 0.001)
        timing.record(0, 4, 0.010)
    assert timing.predict_s(254) == pytest.approx(0.260, rel=0.01)
    assert timing.decode_step_s == pytest.approx(0.010)
    assert timing.prefill_tokens_per_s == pytest.approx(500 / 0.510, rel=0.01)
