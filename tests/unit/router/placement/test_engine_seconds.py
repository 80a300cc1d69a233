"""What requests take of the engines, as workers say of their steps."""

from dataclasses import replace

import pytest

from diptych.step_model import NUM_KNOWN_STEPS, StepCost, StepModel, StepWork
from router.placement.engine_seconds import EngineRates, RecentRates, rates_of
from router.placement.views import DecodeView, EngineView, PrefillView, Snapshot, WorkerId

MODEL = StepModel(
    decode=StepCost(0.04, 0.002, 0.0, 0.0, 0.0, 1.2, NUM_KNOWN_STEPS),
    prefill=StepCost(0.1, 0.0, 0.0, 0.001, 0.0, 1.2, NUM_KNOWN_STEPS),
)


def prefill(model: StepModel | None) -> PrefillView:
    engine = None if model is None else EngineView(model=model, max_batched_tokens=512, work=EMPTY)
    return PrefillView(
        worker=WorkerId("p:1", "p"), num_pending_tokens=0, max_model_len=99, engine=engine
    )


EMPTY = StepWork()


def decode(model: StepModel, num_rows: int = 0) -> DecodeView:
    work = StepWork(num_rows, 100 * num_rows)
    return DecodeView(
        worker=WorkerId("d:1", "d"),
        num_sequences=num_rows,
        max_model_len=99,
        local_prefill=True,
        proven=frozenset(),
        engine=EngineView(model=model, max_batched_tokens=512, work=work),
    )


def test_the_mean_of_those_that_know() -> None:
    slow = MODEL._replace(prefill=MODEL.prefill._replace(fixed_s=0.612))
    pool = (prefill(MODEL), prefill(slow), prefill(StepModel()), prefill(None))
    rates = rates_of(Snapshot(pool, (decode(MODEL),)))
    assert rates.prompt_token_s == pytest.approx((0.612 + 1.124) / 2 / 512)
    assert rates.output_token_s == pytest.approx(0.042)
    assert rates.cost_s(512, 10) == pytest.approx(0.868 + 0.42)


def test_a_sequence_has_its_part_of_a_step() -> None:
    rates = rates_of(Snapshot((), (decode(MODEL, 10),)))
    assert rates.output_token_s == pytest.approx((0.04 + 10 * 0.002) / 10)
    assert rates.prompt_token_s == pytest.approx((0.1 + 0.512) / 512), "nobody else computes them"


def test_whoever_computes_prompts_says_what_they_take() -> None:
    """Prefill workers where there are some; else who decodes, unless it may not compute any."""
    fast = MODEL._replace(prefill=MODEL.prefill._replace(fixed_s=0.0, prefill_token_s=2.5e-5))
    alone, guess = decode(fast), EngineRates().prompt_token_s
    assert rates_of(Snapshot((), (alone,))).prompt_token_s == pytest.approx(2.5e-5)
    apart = rates_of(Snapshot((prefill(MODEL),), (alone,)))
    assert apart.prompt_token_s == pytest.approx((0.1 + 0.512) / 512)
    assert rates_of(Snapshot((prefill(None),), (alone,))).prompt_token_s == guess
    may_not = replace(alone, local_prefill=False)
    assert rates_of(Snapshot((), (may_not,))).prompt_token_s == guess


def test_a_guess_until_somebody_knows() -> None:
    assert rates_of(Snapshot((prefill(None),), (decode(StepModel()),))) == EngineRates()


def test_all_workers_are_looked_at_four_times_a_second_at_most() -> None:
    now_s = 5.0
    recent = RecentRates(lambda: now_s)
    known = Snapshot((), (decode(MODEL, 10),))
    assert recent.of(Snapshot()) == EngineRates()
    now_s += 0.2
    assert recent.of(known) == EngineRates()
    now_s += 0.05
    assert recent.of(known) == rates_of(known)


def test_what_one_says_that_is_astray_changes_little() -> None:
    """A tenant that were charged by it would wait for all others for hours."""
    astray = MODEL._replace(prefill=MODEL.prefill._replace(fixed_s=100.0, prefill_token_s=100.0))
    sound = (prefill(MODEL), prefill(MODEL))
    rates = rates_of(Snapshot((*sound, prefill(astray)), ()))
    assert rates.prompt_token_s == rates_of(Snapshot(sound, ())).prompt_token_s


def test_rates_rise_by_steps_and_fall_at_once() -> None:
    """Where one worker is all there is, a glitch of a moment is no more than twice as much."""
    now_s = 5.0
    recent = RecentRates(lambda: now_s)
    slow = MODEL._replace(decode=MODEL.decode._replace(fixed_s=99.0))
    sound, glitch = Snapshot((), (decode(MODEL),)), Snapshot((), (decode(slow),))
    for _ in range(9):
        now_s += 1.0
        before = recent.of(sound)
    assert before == rates_of(sound)
    now_s += 1.0
    assert recent.of(glitch).output_token_s == pytest.approx(2 * before.output_token_s)
    now_s += 1.0
    assert recent.of(sound) == before
    for _ in range(20):
        now_s += 1.0
        lasting = recent.of(glitch)
    assert lasting == rates_of(glitch)


def test_rates_are_what_they_were_while_nobody_can_tell() -> None:
    """Whoever asks while workers are away is charged as those before and after it."""
    now_s = 5.0
    recent = RecentRates(lambda: now_s)
    fast = MODEL._replace(decode=MODEL.decode._replace(fixed_s=2e-4, row_s=1e-5))
    slow = MODEL._replace(decode=MODEL.decode._replace(fixed_s=0.5))
    for model in (fast, slow):
        told = Snapshot((prefill(MODEL),), (decode(model),))
        for _ in range(20):
            now_s += 1.0
            before = recent.of(told)
        assert before == rates_of(told)
        for away in (Snapshot(told.prefill, ()), Snapshot(), Snapshot((), (decode(StepModel()),))):
            for _ in range(20):
                now_s += 1.0
                assert recent.of(away) == before


def test_rates_rise_again_after_one_said_that_tokens_take_no_time() -> None:
    """So little that a part of it is nothing: twice that is nothing, too."""
    now_s = 5.0
    recent = RecentRates(lambda: now_s)
    cost = StepCost(fixed_s=5e-324, num_steps=NUM_KNOWN_STEPS)
    least = StepModel.from_proto(StepModel(cost, cost).to_proto())
    assert recent.of(Snapshot((), (decode(least, 8),))) == EngineRates(0.0, 0.0)
    sound = Snapshot((), (decode(MODEL),))
    for _ in range(40):
        now_s += 1.0
        rates = recent.of(sound)
    assert rates == rates_of(sound)
