"""How much of an engine's time goes into prompts, as of late."""

import statistics

import pytest

from diptych.engine.scheduling.prefill_time import PrefillTime
from diptych.step_model import StepCost, StepModel, StepWork


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_none_before_the_first_prompt(clock: Clock) -> None:
    spent = PrefillTime(clock)
    clock.now_s += 50.0
    assert spent.ratio == 0.0


@pytest.mark.parametrize("busy_ratio", [0.25, 0.75, 1.0])
def test_it_is_known_soon_and_stays(clock: Clock, busy_ratio: float) -> None:
    spent = PrefillTime(clock)
    for second in range(60):
        clock.now_s += 1.0
        spent.add(busy_ratio)
        if second > 5:
            assert spent.ratio == pytest.approx(busy_ratio, rel=0.25)


def test_one_step_alone_does_not_make_all_of_its_time(clock: Clock) -> None:
    spent = PrefillTime(clock)
    spent.add(0.5)
    assert 0.0 < spent.ratio < 0.5


@pytest.mark.parametrize("num_tokens", [8, 50, 200])
def test_tokens_come_as_often_as_the_rest_of_its_time_says(num_tokens: int, clock: Clock) -> None:
    """Of twenty steps one has a part of a prompt, and a token for each row like the others."""
    model = StepModel(StepCost(0.01, 0.003), StepCost(0.03, 0.003, prefill_token_s=0.002))
    spent, rows = PrefillTime(clock), StepWork(num_decode_rows=4)
    begin_s, num_steps, ratios = clock.now_s, 0, []
    for _ in range(100):
        for work in (*[rows] * 19, rows._replace(num_prefill_tokens=num_tokens)):
            took_s = model.cost_of(work).expected_s(work)
            clock.now_s += took_s
            num_steps += 1
            if work.num_prefill_tokens:
                spent.add(model.of_prompts_s(work, took_s))
            ratios.append(spent.ratio)
    token_s = (clock.now_s - begin_s) / num_steps
    ratio = statistics.fmean(ratios[1000:])
    assert model.decode.expected_s(rows) / (1 - ratio) == pytest.approx(token_s, rel=0.1)


def test_of_a_step_without_rows_all_is_for_prompts() -> None:
    model = StepModel(StepCost(0.01, 0.003), StepCost(0.03, 0.003, prefill_token_s=0.002))
    prompts = StepWork(num_prefill_tokens=100)
    assert model.of_prompts_s(prompts, 0.23) == 0.23
    assert model.of_prompts_s(prompts._replace(num_decode_rows=2), 0.23) == pytest.approx(0.214)
    assert model.of_prompts_s(StepWork(2, 0, 4), 0.01) == 0.0


def test_it_fades(clock: Clock) -> None:
    spent = PrefillTime(clock)
    for _ in range(20):
        clock.now_s += 1.0
        spent.add(1.0)
    full = spent.ratio
    clock.now_s += 5.0
    assert 0.3 * full < spent.ratio < 0.45 * full
    clock.now_s += 60.0
    assert spent.ratio < 0.001
