"""What is foretold of a worker follows from what it said, and what was sent there since."""

import dataclasses
import math
from typing import Any

import pytest

from diptych.block_needs import ShippedBytes
from diptych.step_model import NUM_KNOWN_STEPS, StepCost, StepModel, StepWork, num_pairs
from router.placement.forecast import (
    PrefillForecast,
    Queue,
    Span,
    exposed_s,
    of_decode,
    of_prefill,
    of_prompts,
    queued_stall_s,
)
from router.placement.views import DecodeView, EngineView, PrefillView, WorkerId

MODEL = StepModel(
    StepCost(0.04, 0.002, 0.00001, 0.0, 0.0, 1.25, NUM_KNOWN_STEPS),
    StepCost(0.1, 0.002, 0.00001, 0.001, 0.0000001, 1.5, NUM_KNOWN_STEPS),
)
IDLE = StepWork()
PROMPT = StepWork.of_prompt(1000, 0)
NOW_S = 100.0


def prefill_view(engine: EngineView | None) -> PrefillView:
    worker = WorkerId("p:1", "p")
    return PrefillView(worker=worker, num_pending_tokens=0, max_model_len=4096, engine=engine)


def decode_view(engine: EngineView | None, num_sequences: int = 0) -> DecodeView:
    return DecodeView(
        worker=WorkerId("d:1", "d"),
        num_sequences=num_sequences,
        max_model_len=4096,
        local_prefill=True,
        proven=frozenset(),
        engine=engine,
    )


def engine(
    work: StepWork = IDLE,
    since: int = 0,
    model: StepModel = MODEL,
    computed: int = 0,
    age_s: float | None = None,
    since_s: float = 0.0,
    busy: float = 0.0,
) -> EngineView:
    return EngineView(
        model=model,
        max_batched_tokens=500,
        work=work,
        num_departed_tokens=since,
        num_computed_tokens=computed,
        prefill_age_s=age_s,
        heard_s=NOW_S - since_s,
        prefill_time_ratio=busy,
    )


def first_token_s(view: EngineView) -> float:
    forecast = of_prefill(prefill_view(view), PROMPT, NOW_S)
    assert forecast is not None
    return forecast.first_token.expected_s


def test_an_idle_worker_takes_the_steps_of_the_prompt() -> None:
    forecast = of_prefill(prefill_view(engine()), PROMPT, NOW_S)
    assert forecast is not None
    pairs = num_pairs(0, 1000)
    assert forecast.first_token.expected_s == pytest.approx(2 * 0.1 + 1.0 + pairs * 1e-7)
    assert forecast.first_token.upper_s == pytest.approx(1.5 * forecast.first_token.expected_s)
    assert (forecast.num_own_steps, forecast.own_s) == (2, forecast.first_token.expected_s)


def test_a_queue_is_worked_off_first_and_half_of_its_step_is_over() -> None:
    queue = StepWork.of_prompt(1000, 0)
    alone_s = first_token_s(engine())
    assert first_token_s(engine(queue)) == pytest.approx(2 * alone_s - 0.5 * alone_s / 2)


def test_sequences_that_decode_are_in_every_step_and_take_of_its_budget() -> None:
    rows = StepWork(100, 20_000)
    forecast = of_prefill(prefill_view(engine(rows)), PROMPT, NOW_S)
    assert forecast is not None
    assert forecast.num_own_steps == 3  # of 400 tokens
    steps_s = 3 * (0.1 + 100 * 0.002 + 20_000 * 0.00001) + 1.0 + num_pairs(0, 1000) * 1e-7
    running_s = 0.04 + 100 * 0.002 + 20_000 * 0.00001
    assert forecast.own_s == pytest.approx(steps_s)
    assert forecast.first_token.expected_s == pytest.approx(steps_s + 0.5 * running_s)


def test_a_step_that_has_not_begun_is_filled_up_by_prompts_that_come_behind() -> None:
    """As many come as came of late, and as are taken: a step whose tokens take four times what it
    costs by itself is left as it is, unless sequences decode beside it.
    """
    brief, of_step = StepWork.of_prompt(100, 0), StepWork.of_prompt(500, 0)
    idle_s, step_s = soonest_s(engine(), brief), soonest_s(engine(), of_step)
    assert idle_s == pytest.approx(0.1 + 0.1, rel=0.01)
    queue = engine(of_step, since=500, age_s=0.0, busy=1.0)
    assert soonest_s(queue, brief) == pytest.approx(2 * step_s + idle_s + 0.3, rel=0.02)
    full = engine(of_step, since=400, age_s=0.0, busy=1.0)
    assert soonest_s(full, brief) == pytest.approx(2 * step_s, rel=0.02)
    soon = engine(of_step, age_s=step_s - 0.06, busy=1.0)
    assert soonest_s(soon, brief) == pytest.approx(0.06 + idle_s + 0.05, rel=0.001)
    rows = StepWork(1, 100)
    beside = engine(rows.plus(of_step), since=500, age_s=0.0, busy=1.0)
    assert soonest_s(beside, brief) == pytest.approx(2 * step_s + idle_s + 0.4, rel=0.02)
    forecast = of_prefill(prefill_view(queue), brief, NOW_S)
    assert forecast is not None
    assert forecast.own_s == pytest.approx(idle_s, rel=0.02), "what others have of it is not ours"
    calm_s = step_s + idle_s
    for busy in (0.0, 0.1, 0.3):  # where prompts are rare, hardly any come behind
        rarely = engine(of_step, age_s=0.0, busy=busy)
        assert soonest_s(rarely, brief) == pytest.approx(calm_s + busy * 0.5, rel=0.01)


def test_what_was_sent_since_is_ahead_and_what_was_done_since_is_not() -> None:
    idle_s, queue = first_token_s(engine()), StepWork.of_prompt(1000, 0)
    assert first_token_s(engine(since=1000)) == pytest.approx(2 * idle_s, rel=0.01)
    assert first_token_s(engine(queue, computed=1000)) == pytest.approx(idle_s)
    assert first_token_s(engine(queue, computed=5000)) == pytest.approx(idle_s)
    sent = engine(since=1000)
    assert first_token_s(engine(queue, 1000, computed=5000)) >= first_token_s(sent) - 0.5 * idle_s
    assert first_token_s(engine(since=1000, computed=1000)) == first_token_s(sent)


def test_the_step_that_runs_is_not_ours_and_ends_when_it_has_taken_what_it_takes() -> None:
    """A short prompt would fit into it, but it has begun."""
    brief, queue = StepWork.of_prompt(200, 0), StepWork.of_prompt(300, 0)
    idle_s, step_s = soonest_s(engine(), brief), soonest_s(engine(), queue)
    for age_s, since_s in ((0.0, 0.0), (0.1, 0.0), (0.1, 0.2), (-0.1, 0.15)):
        told = engine(queue, age_s=age_s, since_s=since_s)
        assert soonest_s(told, brief) == pytest.approx(step_s - age_s - since_s + idle_s)
    assert soonest_s(engine(queue, age_s=0.3, since_s=0.9), brief) == pytest.approx(idle_s)


def test_a_step_that_takes_too_long_says_nothing_of_what_is_behind_it() -> None:
    """It may hang: nothing that waits has begun."""
    queue = StepWork.of_prompt(2000, 0)
    behind_s = soonest_s(engine(StepWork.of_prompt(1500, 0), age_s=0.0), PROMPT)
    assert soonest_s(engine(queue, age_s=60.0), PROMPT) >= behind_s
    sent = engine(StepWork.of_prompt(300, 0), 2000, age_s=60.0, since_s=60.0)
    assert soonest_s(sent, PROMPT) == pytest.approx(soonest_s(engine(since=2000), PROMPT))
    long_ago, heard = (soonest_s(engine(queue, age_s=0.0, since_s=s), PROMPT) for s in (60.0, 1.0))
    assert long_ago == heard, "who says nothing is not idle"


def test_what_comes_before_a_step_begins_is_in_it() -> None:
    together = soonest_s(engine(), StepWork.of_prompt(500, 0)._replace(num_attention_pairs=65_150))
    pairs = num_pairs(0, 300) + num_pairs(0, 200)
    for age_s, since_s in ((-0.03, 0.0), (-0.05, 0.02)):
        told = engine(StepWork.of_prompt(300, 0), age_s=age_s, since_s=since_s)
        expected_s = together + 0.03 + (pairs - 65_150) * 1e-7
        assert soonest_s(told, StepWork.of_prompt(200, 0)) == pytest.approx(expected_s)


def test_a_queue_goes_on_while_nothing_is_heard_of_it() -> None:
    """What is heard of prompts that are done says no more than the time that has passed."""
    queue = StepWork.of_prompt(2000, 0)
    begun_s = soonest_s(engine(queue, age_s=0.0), PROMPT)
    for since_s in (0.3, 0.9):
        for computed in (0, 100):
            told = engine(queue, computed=computed, age_s=0.0, since_s=since_s)
            assert soonest_s(told, PROMPT) == pytest.approx(begun_s - since_s)


def test_prompts_that_were_given_up_are_not_waited_for() -> None:
    """All that it told of are gone, which no time explains."""
    queue = StepWork.of_prompt(4000, 0)
    told = engine(queue, computed=4000, age_s=0.1)
    assert soonest_s(told, PROMPT) == pytest.approx(soonest_s(engine(), PROMPT))


def test_who_passes_others_waits_for_the_step_of_theirs_that_runs() -> None:
    queue = prefill_view(engine(StepWork.of_prompt(4000, 0), age_s=0.0, since_s=0.9))
    idle_s = soonest_s(engine(), PROMPT)
    forecast = of_prefill(queue, PROMPT, NOW_S, 4000)
    assert forecast is not None
    assert idle_s < forecast.first_token.expected_s < idle_s + 0.8


def test_more_passed_than_waits_is_no_less_than_nothing() -> None:
    queue = prefill_view(engine(StepWork.of_prompt(300, 0), age_s=0.0))
    passing, behind = (of_prefill(queue, PROMPT, NOW_S, num) for num in (9000, 0))
    assert passing == behind


def test_of_prompts_that_a_decode_worker_is_at_less_is_left_with_time() -> None:
    all_s = 2 * 0.1 + 1.0 + num_pairs(0, 1000) * 1e-7
    for age_s, since_s, left_s in ((-0.05, 0.0, all_s + 0.05), (0.1, 0.2, all_s - 0.3)):
        told = engine(PROMPT, age_s=age_s, since_s=since_s)
        assert tuple(of_prompts(decode_view(told), NOW_S)) == pytest.approx((0.0, left_s))
    brief = StepWork.of_prompt(300, 0)
    over = engine(brief, since=400, age_s=0.5, since_s=9.0)
    assert tuple(of_prompts(decode_view(over), NOW_S)) == pytest.approx((0.0, 0.1 + 0.4))


def soonest_s(view: EngineView, prompt: StepWork) -> float:
    forecast = of_prefill(prefill_view(view), prompt, NOW_S)
    assert forecast is not None
    return forecast.first_token.expected_s


def test_tokens_come_further_apart_with_a_sequence_more() -> None:
    """One of three does not run yet: it is taken to be as long as ours."""
    forecast = of_decode(decode_view(engine(StepWork(2, 300)), num_sequences=3), 1000)
    assert forecast is not None
    assert forecast.num_rows == 3
    assert forecast.before.expected_s == pytest.approx(0.04 + 3 * 0.002 + 1300 * 0.00001)
    assert forecast.after.expected_s == pytest.approx(0.04 + 4 * 0.002 + 2300 * 0.00001)
    assert forecast.after.upper_s == pytest.approx(1.25 * forecast.after.expected_s)


def test_nothing_is_foretold_of_steps_that_are_not_known() -> None:
    cold = engine(model=StepModel(MODEL.decode._replace(num_steps=1), MODEL.prefill))
    assert of_decode(decode_view(cold), 10) is None
    assert of_prefill(decode_view(cold), PROMPT, NOW_S) is not None
    assert of_prefill(prefill_view(None), PROMPT, NOW_S) is None
    assert of_decode(decode_view(None), 10) is None


def test_how_likely_a_span_is_exceeded() -> None:
    span = Span(1.0, 1.5)
    assert span.miss_ratio(1.0) == pytest.approx(0.5)
    assert span.miss_ratio(1.5) == pytest.approx(0.1, abs=0.001)
    assert span.miss_ratio(100.0) < 1e-6
    assert Span(1.0, 1.0).miss_ratio(0.9) == 1.0
    assert Span(1.0, 1.0).miss_ratio(1.1) == 0.0
    assert Span(0.0, 0.0).miss_ratio(math.ulp(0.0)) == 0.0


def test_the_likelihood_of_a_miss_is_known_however_little_or_much_is_wanted() -> None:
    least = math.ulp(0.0)
    assert Span(3.0, 3.3).miss_ratio(least) == 1.0
    assert Span(least, 1.0).miss_ratio(1e308) < 0.5
    assert Span(3.0, math.nextafter(3.0, 4.0)).miss_ratio(2.9) == 1.0
    assert Span(math.nextafter(2.0, 1.0), 2.0).miss_ratio(2.1) == 0.0


def test_who_computes_prompts_much_of_its_time_makes_tokens_as_much_slower() -> None:
    """And does not stand still, however much it was."""
    calm = decode_view(engine(StepWork(2, 1000)), 2)
    calm_s = tokens_s(calm)
    half_s = tokens_s(dataclasses.replace(calm, prefill_time_ratio=0.5))
    assert half_s == pytest.approx([2 * each_s for each_s in calm_s])
    assert max(tokens_s(dataclasses.replace(calm, prefill_time_ratio=1.0))) < 1.0


def test_who_is_idle_is_not_made_slower_by_a_long_prompt_that_it_had() -> None:
    """Of prompts of five seconds, what they took in five says only that one has just been there."""
    calm = decode_view(engine(), 0)
    worn = dataclasses.replace(calm, prefill_time_ratio=0.9)
    assert slower(worn, calm, 100) > 8.0, "more short ones will come"
    assert slower(worn, calm, 100_000) < 1.01
    busy = dataclasses.replace(worn, num_pending_tokens=100)
    assert slower(busy, calm, 100_000) == pytest.approx(10.0)


def slower(view: DecodeView, than: DecodeView, num_tokens: int) -> float:
    """So many times as much as on the other one a token takes there."""
    ours, theirs = of_decode(view, num_tokens), of_decode(than, num_tokens)
    assert ours is not None
    assert theirs is not None
    return ours.after.expected_s / theirs.after.expected_s


def test_prompts_that_a_decode_worker_was_given() -> None:
    """Of those that it told of some part of a step is over; what was sent since is all there."""
    all_s = 2 * 0.1 + 1.0 + num_pairs(0, 1000) * 1e-7
    told = of_prompts(decode_view(engine(PROMPT)), NOW_S)
    assert tuple(told) == pytest.approx((all_s / 2, all_s / 2))
    sent = of_prompts(decode_view(engine(since=400)), NOW_S)
    assert tuple(sent) == pytest.approx((0.0, 0.1 + 0.4))
    for nothing in (None, engine(), engine(PROMPT, model=StepModel())):
        assert of_prompts(decode_view(nothing), NOW_S) == Queue()


def tokens_s(view: DecodeView) -> list[float]:
    forecast = of_decode(view, 500)
    assert forecast is not None
    return [forecast.before.expected_s, forecast.after.expected_s]


def test_a_payers_first_prompt_waits_for_no_more_than_a_step_of_others() -> None:
    """What this router sent of others' waits for its turn; what other routers sent is ahead."""
    queue = prefill_view(engine(StepWork(num_prefill_tokens=4000)))
    behind_all, passing = (of_prefill(queue, PROMPT, NOW_S, behind) for behind in (0, 4000))
    one_step = of_prefill(prefill_view(engine(StepWork(num_prefill_tokens=500))), PROMPT, NOW_S)
    part = of_prefill(queue, PROMPT, NOW_S, 2000 + 500)
    half = of_prefill(prefill_view(engine(StepWork(num_prefill_tokens=2000))), PROMPT, NOW_S)
    assert behind_all is not None
    assert passing is not None
    assert one_step is not None
    assert part is not None
    assert half is not None
    assert passing.first_token.expected_s == pytest.approx(one_step.first_token.expected_s)
    assert part.first_token.expected_s == pytest.approx(half.first_token.expected_s)
    assert passing.first_token.expected_s < part.first_token.expected_s
    assert part.first_token.expected_s < behind_all.first_token.expected_s


def test_a_span_between_two_is_so_in_both_its_figures() -> None:
    assert Span(1.0, 2.0).towards(Span(3.0, 6.0), 0.25) == Span(1.5, 3.0)


def test_what_surely_suffices_is_too_little_once_in_two_hundred() -> None:
    span = Span(0.01, 0.0105)
    assert span.miss_ratio(span.surely_s) == pytest.approx(0.0052, abs=2e-4)
    assert Span(0.0, 0.0).surely_s == 0.0


def test_who_decodes_has_a_token_with_each_step_of_a_prompt() -> None:
    computed = PrefillForecast(Span(1.0, 1.0), 0.5, 2)
    assert computed.stall_s(0.04) == pytest.approx(0.42)
    assert computed.stall_s(0.3) == 0.0


def test_what_each_has_yet_to_lose_to_prompts_that_are_there() -> None:
    def lost_s(**changes: Any) -> float:
        return queued_stall_s(decode_view(engine(**changes)), 300, 0.04)

    queued = StepWork.of_prompt(900, 0)
    all_s = 2 * 0.1 + 0.9 + queued.num_attention_pairs * 1e-7 - 2 * 0.04
    assert lost_s(work=queued) == pytest.approx(all_s)
    assert lost_s(work=queued, age_s=0.3) == pytest.approx(all_s - 0.3)
    assert lost_s(work=queued, age_s=-0.3) == pytest.approx(all_s), "its step is yet to begin"
    assert lost_s(work=queued, age_s=9.0) == 0.0
    sent_s = 0.1 + 0.3 + num_pairs(0, 300) * 1e-7 - 0.04
    assert lost_s(since=300, age_s=0.3) == pytest.approx(sent_s), "it is at none of those"
    few = MODEL._replace(prefill=MODEL.prefill._replace(num_steps=NUM_KNOWN_STEPS - 1))
    assert lost_s(work=queued, model=few) == 0.0
    silent = dataclasses.replace(engine(queued), max_batched_tokens=0)
    assert queued_stall_s(decode_view(silent), 300, 0.04) == 0.0


@pytest.mark.parametrize(
    ("num_missing", "num_computed", "num_steps", "bytes_per_s", "exposed"),
    [
        (1000, 1000, 1, 1e8, 0.010),  # nothing is computed after it
        (1000, 1000, 2, 1e8, 0.005),  # the first half is there when the second is computed
        (1000, 1000, 4, 1e8, 0.0025),
        (1000, 1000, 4, 1e6, 1.0 - 0.4 * 3 / 4),  # the link is what is waited for
        (400, 1000, 2, 1e8, 0.004),  # the last step computes all that is missing
        (600, 1000, 2, 1e8, 0.005),
        (1000, 100, 1, 1e8, 0.001),  # the others were there from the beginning
        (1000, 100, 1, 1e6, 1.0 - 0.5),  # and are moved for as long as it waits and is computed
        (0, 1000, 2, 1e8, 0.0),
        (1000, 1000, 1, 0.0, 0.0),  # not known
    ],
)
def test_of_a_pull_what_the_last_step_computed_is_left_when_the_first_token_comes(
    num_missing: int, num_computed: int, num_steps: int, bytes_per_s: float, exposed: float
) -> None:
    """Tokens of 1,000 bytes; it waits for 0.1 s and is computed for 0.4 s."""
    rates, shipped = {"p": bytes_per_s}, ShippedBytes.even(1000.0)
    view = dataclasses.replace(decode_view(None), bytes_per_s=rates, shipped=shipped)
    computed = PrefillForecast(Span(0.5, 0.5), 0.4, num_steps)
    foretold_s = exposed_s(prefill_view(None), view, num_missing, num_computed, computed)
    assert foretold_s == pytest.approx(exposed)


def test_of_layers_with_a_window_the_last_step_computes_all_that_is_shipped() -> None:
    rates, windowed = {"p": 1e8}, ShippedBytes(((1000.0, None), (9000.0, 100)))
    view = dataclasses.replace(decode_view(None), bytes_per_s=rates, shipped=windowed)
    computed = PrefillForecast(Span(0.4, 0.4), 0.4, 4)
    foretold_s = exposed_s(prefill_view(None), view, 1000, 1000, computed)
    assert foretold_s == pytest.approx((250 * 1000.0 + 100 * 9000.0) / 1e8)
