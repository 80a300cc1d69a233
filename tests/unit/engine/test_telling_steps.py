"""Steps that tell of their prompts' tokens take longer, and do not teach what others take."""

import asyncio
import math
import threading

import pytest

from diptych.engine.engine import StepEngine
from diptych.engine.scheduling.report import (
    LogprobsPart,
    LogprobsReport,
    Pooling,
    PoolingReport,
    Report,
    SummedStates,
    Told,
)
from diptych.engine.scheduling.sequence import Sequence, SequenceKey, SequenceState
from diptych.engine.scheduling.step import (
    SampledToken,
    SequenceUpdate,
    StepOutput,
    StepPlan,
)
from diptych.engine.scheduling.step_learner import num_told
from diptych.sampling_params import SamplingParams
from diptych.step_model import NUM_KNOWN_STEPS, MeasuredStep, StepCost, StepWork
from diptych.token_logprobs import PromptLogprobs
from tests.unit.engine.engine_rig import EngineRig

ALL_ROWS, ONE_ROW = LogprobsReport(1, 16, 0), LogprobsReport(15, 16, 0)
POOLED = PoolingReport(Pooling.MEAN)
TRIALS = [
    MeasuredStep(StepWork.of_prompt(num_tokens, 0), 0.01 * num_tokens)
    for num_tokens in (4, 8, 12, 16)
    for _ in range(6)
]


class TellingRunner:
    """Takes half as long again for a chunk that tells log probabilities."""

    def execute(self, plan: StepPlan) -> StepOutput:
        tokens = tuple(SampledToken(7, math.nan) if chunk.sample else None for chunk in plan.chunks)
        told: dict[int, Told] = {}
        duration_s = 0.01 * plan.num_tokens
        for index, chunk in enumerate(plan.chunks):
            if isinstance(chunk.report, LogprobsPart):
                told[index] = PromptLogprobs(chunk.report.position, ())
                duration_s *= 1.0 + 0.5 * chunk.report.num_rows / plan.num_tokens
            elif chunk.report is not None:
                told[index] = SummedStates(())
        return StepOutput(tokens=tokens, duration_s=duration_s, reports=told)


async def learned(reports: list[Report | None], trials: list[MeasuredStep]) -> StepCost:
    """Of an engine that computed such prompts one after the other."""
    runner = TellingRunner()
    rig = EngineRig(lambda scheduler: StepEngine(scheduler, runner, measured=trials))
    async with rig.running():
        for number, report in enumerate(reports):
            await until_told(rig, add_prefill(rig, number, report))
    return rig.engine.step_model.prefill


def add_prefill(
    rig: EngineRig, number: int, report: Report | None, num_tokens: int = 16
) -> Sequence:
    seq = Sequence(
        key=SequenceKey("router", number),
        token_ids=[number] * num_tokens,
        num_prompt_tokens=num_tokens,
        sampling=SamplingParams(max_tokens=1),
        prefill_only=True,
        report=report,
    )
    rig.engine.add_prefill(seq)
    return seq


async def until_told(rig: EngineRig, seq: Sequence) -> None:
    while seq.state is not SequenceState.LEASED:
        rig.stepped.clear()
        await rig.stepped.wait()
    rig.engine.release(seq)


@pytest.mark.parametrize("reports", [[ALL_ROWS] * 40, [None, ALL_ROWS] * 40, [ALL_ROWS, POOLED]])
async def test_steps_that_tell_of_their_prompts_do_not_teach_what_others_take(
    reports: list[Report | None],
) -> None:
    """One whose steps all do still knows what it measured before the first."""
    cost = await learned(reports, TRIALS)
    assert cost.is_known
    assert cost.num_steps == len(TRIALS) + len(reports) - reports.count(ALL_ROWS)
    assert cost.expected_s(StepWork.of_prompt(16, 0)) == pytest.approx(0.16, rel=0.05)


async def test_steps_that_take_no_longer_for_what_they_tell_are_learned_from() -> None:
    cost = await learned([ONE_ROW, POOLED] * 10, TRIALS)
    assert cost.num_steps == len(TRIALS) + 20


async def test_who_knows_nothing_learns_from_any_step() -> None:
    """Else nothing would be foretold of a worker without trials all of whose steps tell."""
    cost = await learned([ALL_ROWS] * 40, [])
    assert cost.num_steps == NUM_KNOWN_STEPS
    assert cost.expected_s(StepWork.of_prompt(16, 0)) == pytest.approx(0.24, rel=0.1)


class HeavyTeller:
    """Of a small model with many tokens: to tell of one takes as long as to compute ten."""

    def __init__(self) -> None:
        self.gate = threading.Semaphore(0)  # for a step each
        self.took: list[float] = []

    def execute(self, plan: StepPlan) -> StepOutput:
        self.gate.acquire()
        (chunk,) = plan.chunks
        num_told, told = 0, dict[int, Told]()
        if isinstance(chunk.report, LogprobsPart):
            num_told, told[0] = chunk.report.num_rows, PromptLogprobs(chunk.report.position, ())
        self.took.append(0.01 * (plan.num_tokens + 10 * num_told))
        tokens = (SampledToken(7, math.nan) if chunk.sample else None,)
        return StepOutput(tokens=tokens, duration_s=self.took[-1], reports=told)


async def test_a_step_that_tells_much_is_not_taken_for_one_that_never_ends() -> None:
    """The worker is ended, and taken for lost, after twice what a step was foretold to take."""
    runner, foretold = HeavyTeller(), list[float]()
    rig = EngineRig(lambda scheduler: StepEngine(scheduler, runner, measured=TRIALS))

    async with rig.running():
        for number, report in enumerate([ALL_ROWS, None, ALL_ROWS, ONE_ROW, ALL_ROWS]):
            seq = add_prefill(rig, number, report)
            await asyncio.sleep(0)  # its step is at work
            foretold.append(rig.engine.predicted_step_s)
            runner.gate.release()
            await until_told(rig, seq)
    assert all(2 * each >= took for each, took in zip(foretold, runner.took, strict=True))
    assert foretold[1] < 0.3
    assert foretold[2] == pytest.approx(runner.took[2], rel=0.3)


DECODE_TRIALS = [MeasuredStep(StepWork(1, num_tokens), 0.01) for num_tokens in range(5, 35)]
TPOT_S = 0.4


class TimedTeller:
    """By a clock that only its steps move: a token told of takes as long as to compute so many."""

    def __init__(self, num_like_told: int) -> None:
        self._num_like_told = num_like_told
        self.now_s = 0.0
        self.held_up_s = 0.0  # in each step

    def execute(self, plan: StepPlan) -> StepOutput:
        duration_s = 0.01 * (plan.num_tokens + self._num_like_told * num_told(plan))
        duration_s += self.held_up_s
        self.now_s += duration_s
        tokens = tuple(SampledToken(7, math.nan) if chunk.sample else None for chunk in plan.chunks)
        told: dict[int, Told] = {
            index: PromptLogprobs(chunk.report.position, ())
            for index, chunk in enumerate(plan.chunks)
            if isinstance(chunk.report, LogprobsPart)
        }
        return StepOutput(tokens=tokens, duration_s=duration_s, reports=told)


@pytest.mark.parametrize("first_position", [1, 20])
@pytest.mark.parametrize(("num_like_told", "has_told"), [(10, False), (30, True)])
async def test_prompts_that_are_told_of_break_no_promise_to_who_decodes_beside(
    first_position: int, num_like_told: int, has_told: bool
) -> None:
    """By what it took until now, if any was told of; those to tell of may come late."""
    runner, times = TimedTeller(num_like_told), list[float]()
    rig = EngineRig(
        lambda scheduler: StepEngine(
            scheduler,
            runner,
            measured=[*TRIALS, *DECODE_TRIALS],
            tpot_s=TPOT_S,
            clock=lambda: runner.now_s,
        )
    )
    report = LogprobsReport(first_position, 24, 0)
    async with rig.running():
        if has_told:
            await until_told(rig, add_prefill(rig, 1, ALL_ROWS))
        decoding = rig.start(4, max_tokens=25)

        def note(updates: list[SequenceUpdate]) -> None:
            times.extend(runner.now_s for update in updates if update.sequence is decoding)

        rig.engine.subscribe(note)
        prompt = add_prefill(rig, 2, report, num_tokens=24)
        await rig.until_finished(decoding)
        assert prompt.state is SequenceState.LEASED
    late_s = [at_s - (times[0] + TPOT_S * number) for number, at_s in enumerate(times)]
    assert max(late_s) <= 1e-9


@pytest.mark.parametrize("num_before", [0, 5])
async def test_a_telling_step_that_was_held_up_does_not_hold_prompts_up_ever_after(
    num_before: int,
) -> None:
    """As by a machine that slept: that was not what telling takes."""
    runner = TimedTeller(10)
    trials = [*TRIALS, *DECODE_TRIALS]
    rig = EngineRig(
        lambda scheduler: StepEngine(
            scheduler, runner, measured=trials, tpot_s=TPOT_S, clock=lambda: runner.now_s
        )
    )
    async with rig.running():
        for number in range(num_before):
            await until_told(rig, add_prefill(rig, number, ALL_ROWS))
        runner.held_up_s = 600.0
        await until_told(rig, add_prefill(rig, num_before, ALL_ROWS))
        runner.held_up_s = 0.0
        decoding = rig.start(4, max_tokens=50, token_id=30)
        prompt = add_prefill(rig, 31, LogprobsReport(1, 24, 0), num_tokens=24)
        await until_told(rig, prompt)
        assert decoding.num_output_tokens < 25
        await rig.until_finished(decoding)
