"""The engine's loop: steps while there is work, sleeps when there is none, fails loudly."""

import asyncio
import itertools
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import pytest

from diptych.engine.engine import MAX_FAILED_STEPS, MAX_STEPS_OUT_OF_MEMORY, StepEngine
from diptych.engine.scheduling.block_pool import Owner
from diptych.engine.scheduling.sequence import Sequence, SequenceKey, SequenceState
from diptych.engine.scheduling.step import SampledToken, SequenceUpdate, StepOutput, StepPlan
from diptych.engine.scheduling.step_learner import StepLearner
from diptych.errors import DeviceLostError, DeviceMemoryError, StepFailedError
from diptych.finish_reason import FinishReason
from diptych.sampling_params import SamplingParams
from diptych.step_model import NUM_KNOWN_STEPS, MeasuredStep, StepCost, StepModel, StepWork
from tests.unit.engine.engine_rig import EngineRig


@dataclass
class GatedRunner:
    """Draws 7 each time; a step lasts until its gate is open."""

    gate: threading.Event = field(default_factory=threading.Event)
    began: threading.Event = field(default_factory=threading.Event)
    plans: list[StepPlan] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)
    error: Exception | None = None

    def execute(self, plan: StepPlan) -> StepOutput:
        self.plans.append(plan)
        self.threads.add(threading.current_thread().name)
        self.began.set()
        self.gate.wait()
        if self.error is not None:
            raise self.error
        tokens = tuple(SampledToken(7, math.nan) if chunk.sample else None for chunk in plan.chunks)
        return StepOutput(tokens=tokens, duration_s=0.5)


class Known(StepLearner):
    """Knows how long steps take, and learns nothing."""

    def __init__(self, model: StepModel) -> None:
        self._known = model

    @property
    def model(self) -> StepModel:
        return self._known

    def learn(self, work: StepWork, duration_s: float) -> None:
        pass


class Rig(EngineRig):
    def __init__(
        self,
        on_step: Callable[[list[SequenceUpdate]], None] | None = None,
        *,
        tpot_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        prepare: Callable[[SamplingParams], Future[None] | None] = lambda params: None,
    ) -> None:
        self.runner = GatedRunner()
        self.runner.gate.set()
        super().__init__(
            lambda scheduler: StepEngine(
                scheduler, self.runner, tpot_s=tpot_s, clock=clock, prepare=prepare
            )
        )
        if on_step is not None:
            self.engine.subscribe(on_step)


async def until_set(event: threading.Event) -> None:
    assert await asyncio.get_running_loop().run_in_executor(None, event.wait, 5)


async def test_runs_to_the_end_and_sleeps() -> None:
    rig = Rig()
    async with rig.running():
        for num_prompt_tokens in (20, 3):  # the second finds a sleeping engine
            seq = rig.start(num_prompt_tokens, max_tokens=3)
            assert rig.engine.step_due
            await rig.until_finished(seq)
            await asyncio.sleep(0)
            assert not rig.engine.step_due
    assert rig.engine.num_steps == len(rig.runner.plans) == 4 + 3
    assert [u.position for u in rig.updates if u.token] == [20, 21, 22, 3, 4, 5]
    assert len(rig.runner.threads) == 1
    assert threading.current_thread().name not in rig.runner.threads
    step = rig.engine.last_step
    assert step is not None
    assert (step.num_prefill_tokens, step.num_decode_tokens, step.duration_s) == (0, 1, 0.5)
    assert rig.engine.decode_step_s == pytest.approx(0.5)
    assert rig.engine.prefill_tokens_per_s == pytest.approx((16 + 4 + 3) / 1.5, rel=0.1)
    assert rig.engine.predicted_step_s == pytest.approx(0.5, rel=0.1)
    assert rig.engine.prefill_time_ratio > 0.0
    model = rig.engine.step_model
    assert (model.prefill.num_steps, model.decode.num_steps) == (3, 4)
    assert model.decode.expected_s(StepWork(1, 22)) == pytest.approx(0.5, rel=0.2)


async def test_what_lies_between_two_steps_is_of_the_second() -> None:
    """Else tokens would come more seldom than steps are said to take."""
    now_s, records = 10.0, list[tuple[float, float]]()

    def listen(updates: list[SequenceUpdate]) -> None:
        nonlocal now_s
        step = rig.engine.last_step
        assert step is not None
        records.append((step.duration_s, step.overhead_s))
        now_s += 0.25  # to tell of the tokens

    def execute(plan: StepPlan, execute: Callable[[StepPlan], StepOutput]) -> StepOutput:
        nonlocal now_s
        now_s += 0.5
        return execute(plan)

    rig = Rig(listen, clock=lambda: now_s)
    rig.runner.execute = partial(execute, execute=rig.runner.execute)  # type: ignore[method-assign]
    async with rig.running():
        for _ in range(2):  # the second finds an engine that slept
            await rig.until_finished(rig.start(4, max_tokens=4))
            await asyncio.sleep(0)
            now_s += 100.0
    assert records == 2 * [(0.5, 0.0), (0.5, 0.25), (0.5, 0.25), (0.5, 0.25)]


async def test_it_tells_how_far_those_are_that_asked_for_a_pace() -> None:
    now_s = 10.0
    rig = Rig(clock=lambda: now_s)
    asking, other = rig.start(4, max_tokens=40, tpot_s=0.05), rig.start(5, max_tokens=40)
    async with rig.running():
        while asking.num_output_tokens < 3:
            rig.stepped.clear()
            await rig.stepped.wait()
        rig.runner.gate.clear()
        now_s = 10.25
        (paced,) = rig.engine.paced()
        assert paced[:2] == (0.05, 0.25)
        assert paced.num_drawn == asking.num_output_tokens - 1
        rig.engine.release(asking)
        assert rig.engine.paced() == []
        rig.engine.release(other)
        rig.runner.gate.set()


async def test_who_waits_for_blocks_runs_once_it_may_share_those_of_a_pull() -> None:
    """Nine blocks each of sixteen; what was pulled is as its prompt begins."""
    rig = Rig()
    waiting = rig.start(32, max_tokens=2, yields=True)
    pulling = Sequence(
        key=SequenceKey("router", 1),
        token_ids=[1] * 32,
        num_prompt_tokens=32,
        sampling=SamplingParams(max_tokens=2),
        to_pull=True,
    )
    rig.engine.reserve(pulling)
    async with rig.running():
        await asyncio.sleep(0.02)
        assert waiting.state is SequenceState.WAITING
        rig.engine.mark_proven(pulling)
        async with asyncio.timeout(5.0):
            await rig.until_finished(waiting)
        rig.engine.release(pulling)


async def test_who_is_not_prepared_waits_beside_the_steps_of_others() -> None:
    """Those that need four tokens do."""
    preparing = Future[None]()
    rig = Rig(prepare=lambda params: preparing if params.max_tokens == 4 else None)
    held, released = (rig.start(5, max_tokens=4, token_id=token_id) for token_id in (1, 2))
    prompt = Sequence(
        key=SequenceKey("router", 1),
        token_ids=[4] * 5,
        num_prompt_tokens=5,
        sampling=SamplingParams(max_tokens=4),
        prefill_only=True,
    )
    rig.engine.add_prefill(prompt)
    async with rig.running():
        async with asyncio.timeout(5.0):
            await rig.until_finished(rig.start(6, max_tokens=3, token_id=3))
        await asyncio.sleep(0)
        assert rig.engine.num_steps == 3, "of this one, which came last, alone"
        assert not rig.engine.step_due
        num_held = rig.engine.load().blocks
        rig.engine.release(released)
        assert rig.engine.load().blocks != num_held, "it holds nothing"
        await asyncio.get_running_loop().run_in_executor(None, preparing.set_result, None)
        async with asyncio.timeout(5.0):
            await rig.until_finished(held)
        assert [seq.num_output_tokens for seq in (held, released, prompt)] == [4, 0, 1]
        assert prompt.preparation is None, "one that is leased has no steps"
        rig.engine.release(prompt)
    assert rig.engine.load().num_preemptions == 0


async def test_what_is_prepared_after_the_run_wakes_nobody() -> None:
    preparing = Future[None]()
    rig = Rig(prepare=lambda params: preparing)
    seq = rig.start(5, max_tokens=2)
    async with rig.running():
        await asyncio.sleep(0)
    rig.engine.release(seq)
    preparing.set_result(None)
    assert rig.engine.num_steps == 0


async def test_where_others_came_prompts_that_yield_get_short_steps() -> None:
    rig = Rig()
    async with rig.running():
        await rig.until_finished(rig.start(12, max_tokens=1, token_id=1, yields=True))
        await rig.until_finished(rig.start(12, max_tokens=1, token_id=2))
        await rig.until_finished(rig.start(12, max_tokens=1, token_id=3, yields=True))
    assert [plan.num_tokens for plan in rig.runner.plans] == [12, 12, 4, 4, 4]


async def test_beside_others_those_that_yield_sit_steps_out() -> None:
    rig = Rig()
    cost = StepCost(fixed_s=0.01, row_s=0.01, num_steps=NUM_KNOWN_STEPS)
    rig.engine._learner = Known(StepModel(cost, cost))
    rows = [rig.start(3, max_tokens=40, token_id=token_id, yields=True) for token_id in (1, 2)]
    async with rig.running():
        while not all(seq.num_output_tokens for seq in rows):
            rig.stepped.clear()
            await rig.stepped.wait()
        load = rig.engine.load()
        held = sum(len(seq.block_table) for seq in rows)
        assert load.giving_way == (2, held)
        await rig.until_finished(rig.start(3, max_tokens=20, token_id=3))
        num_sat_out = rig.engine.load().num_sat_out
        assert 19 <= num_sat_out <= 38, "no more than half a row beside each token"
        for seq in rows:
            await rig.until_finished(seq)
    assert rig.engine.load().num_sat_out == num_sat_out
    assert rig.engine.load().giving_way == (0, 0)
    assert [len(seq.token_ids) for seq in rows] == [43, 43]


async def test_whoever_yields_goes_like_any_other_after_some_time() -> None:
    """Each step takes longer than anybody is passed by."""
    now_s = itertools.count(0.0, 20.0)
    rig = Rig(clock=lambda: next(now_s))
    of_batch = rig.start(4, max_tokens=1, token_id=1, yields=True)
    others = [rig.start(16, max_tokens=1, token_id=token_id) for token_id in (2, 3, 4)]
    async with rig.running():
        await rig.until_finished(others[-1])
    assert of_batch.has_aged


async def test_a_step_in_flight_is_due_until_it_ends() -> None:
    rig = Rig()
    rig.runner.gate.clear()
    async with rig.running():
        seq = rig.start(3, max_tokens=1)
        await until_set(rig.runner.began)
        assert rig.engine.step_due
        assert rig.engine.num_steps == 0
        rig.runner.gate.set()
        await rig.until_finished(seq)
        assert rig.engine.num_steps == 1


async def test_it_says_how_long_it_has_been_at_its_prompts() -> None:
    now_s = 50.0
    rig = Rig(lambda updates: rig.runner.gate.clear(), clock=lambda: now_s)
    cost = StepCost(fixed_s=0.25, num_steps=NUM_KNOWN_STEPS)
    rig.engine._learner = Known(StepModel(cost, cost))
    assert rig.engine.prefill_age_s is None
    rig.runner.gate.clear()
    async with rig.running():
        rig.start(3, max_tokens=2, token_id=1)
        assert rig.engine.prefill_age_s == 0.0
        await until_set(rig.runner.began)
        now_s += 3.0
        assert rig.engine.prefill_age_s == 3.0
        rig.runner.began.clear()
        rig.runner.gate.set()
        await until_set(rig.runner.began)
        assert rig.engine.prefill_age_s is None, "what is in flight only decodes"
        second = rig.start(3, max_tokens=1, token_id=2)
        for waited_s, age_s in ((0.0, -0.25), (0.15, -0.1), (1.0, 0.0)):
            now_s = 53.0 + waited_s
            assert rig.engine.prefill_age_s == pytest.approx(age_s)
        while second.num_output_tokens < 1:
            rig.runner.gate.set()
            await asyncio.sleep(0)
    assert rig.engine.prefill_age_s is None


async def test_no_step_is_due_while_nothing_can_run() -> None:
    rig = Rig()
    async with rig.running():
        rig.pool.allocate(rig.pool.num_available_blocks - 3, Owner.LEASED)
        seq = rig.start(7, max_tokens=9)
        while seq.num_preemptions == 0:
            rig.stepped.clear()
            await rig.stepped.wait()
            await asyncio.sleep(0)
        assert rig.scheduler.has_work
        assert not rig.engine.step_due


async def test_the_listener_may_release() -> None:
    rig = Rig(on_step=lambda updates: rig.scheduler.release(updates[0].sequence))
    async with rig.running():
        seq = rig.start(3, max_tokens=9)
        await rig.until_finished(seq)
    assert rig.engine.num_steps == 1
    assert rig.pool.counts().free == 16


@pytest.mark.parametrize("where", ["device", "listener"])
async def test_an_error_that_is_no_steps_ends_the_loop(where: str) -> None:
    def fail(updates: list[SequenceUpdate]) -> None:
        raise DeviceLostError("broken")

    rig = Rig(on_step=fail if where == "listener" else None)
    rig.runner.error = DeviceLostError("broken") if where == "device" else None
    rig.start(3, max_tokens=9)
    with pytest.raises(DeviceLostError, match="broken"):
        await rig.engine.run()


async def test_an_error_of_a_step_ends_its_sequences_alone() -> None:
    rig = Rig()
    async with rig.running():
        for _ in range(MAX_FAILED_STEPS):  # none of them follows another
            rig.runner.error = RuntimeError("broken")
            failing = rig.start(3, max_tokens=9)
            await rig.until_finished(failing)
            assert isinstance(rig.updates[-1].error, StepFailedError)
            assert "broken" not in str(rig.updates[-1].error)
            assert rig.engine.last_step is None
            rig.runner.error = None
            healthy = rig.start(4, max_tokens=2)
            await rig.until_finished(healthy)
            assert rig.updates[-1].finish_reason is FinishReason.LENGTH
    assert rig.engine.num_steps == MAX_FAILED_STEPS * 3
    assert rig.pool.counts().running == 0


async def ends_with(engine: StepEngine, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        await engine.run()


async def test_errors_of_steps_in_a_row_end_the_loop() -> None:
    rig = Rig()
    rig.runner.error = RuntimeError("broken")
    async with asyncio.TaskGroup() as group:
        loop_task = group.create_task(ends_with(rig.engine, "broken"), name="engine")
        for _ in range(MAX_FAILED_STEPS - 1):
            await rig.until_finished(rig.start(3, max_tokens=9))
        rig.start(3, max_tokens=9)
        await loop_task
    assert len(rig.runner.plans) == MAX_FAILED_STEPS


async def test_a_worker_outlives_steps_that_are_too_large() -> None:
    """Any number of them while a smaller one passes now and then, many that come in a row."""
    rig = Rig()
    async with rig.running():
        for num_too_large in (1, MAX_FAILED_STEPS, MAX_STEPS_OUT_OF_MEMORY - 1):
            rig.runner.error = DeviceMemoryError("tried to allocate 20 GiB")
            for _ in range(num_too_large):
                await rig.until_finished(rig.start(3, max_tokens=9))
                assert isinstance(rig.updates[-1].error, StepFailedError)
            rig.runner.error = None
            await rig.until_finished(rig.start(4, max_tokens=2))
            assert rig.updates[-1].finish_reason is FinishReason.LENGTH
    assert rig.pool.counts().running == 0


async def test_no_memory_for_any_step_ends_the_loop() -> None:
    def start_another(updates: list[SequenceUpdate]) -> None:
        rig.start(3, max_tokens=9)

    rig = Rig(on_step=start_another)
    rig.runner.error = DeviceMemoryError("tried to allocate 20 GiB")
    rig.start(3, max_tokens=9)
    with pytest.raises(DeviceMemoryError):
        await rig.engine.run()
    assert len(rig.runner.plans) == MAX_STEPS_OUT_OF_MEMORY


async def test_cancelling_waits_for_the_step_and_frees_what_was_released() -> None:
    rig = Rig()
    rig.runner.gate.clear()
    ended = asyncio.Event()

    async def run() -> None:
        try:
            await rig.engine.run()
        finally:
            ended.set()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(run(), name="engine")
        seq = rig.start(3, max_tokens=9)
        await until_set(rig.runner.began)
        rig.scheduler.release(seq)
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not ended.is_set()
        rig.runner.gate.set()
        await ended.wait()
    assert rig.pool.counts().free == 16


async def test_cancelling_does_not_wait_for_a_step_that_is_given_up() -> None:
    rig = Rig()
    rig.runner.gate.clear()
    try:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(rig.engine.run(), name="engine")
            seq = rig.start(3, max_tokens=9)
            await until_set(rig.runner.began)
            rig.scheduler.release(seq)
            rig.engine.abandon()
            task.cancel()
        assert rig.pool.counts().running == 2, "the step may still write them"
    finally:
        rig.runner.gate.set()


@pytest.mark.parametrize(("tpot_s", "own_s"), [(None, 0.0), (1.0, 0.0), (None, 2.0)])
async def test_a_promised_pace_holds_a_prompt_back_until_there_is_time(
    tpot_s: float | None, own_s: float
) -> None:
    """Time stands still, so that each token that is drawn is a promised interval to spare."""
    late: list[Sequence] = []

    def on_step(updates: list[SequenceUpdate]) -> None:  # amid steps, so that none is in flight
        if len(rig.runner.plans) == 2:
            late.append(rig.start(12, max_tokens=2))

    rig = Rig(on_step, tpot_s=tpot_s, clock=lambda: 0.0)
    for _ in range(30):
        rig.engine._learner.learn(StepWork(1, 10), 0.5)
        rig.engine._learner.learn(StepWork(0, 0, 8, 36), 20.0)
    async with rig.running():
        await rig.until_finished(rig.start(3, max_tokens=30, tpot_s=own_s))
    assert late[0].state is SequenceState.FINISHED
    sizes = [plan.num_tokens for plan in rig.runner.plans[2:]]
    num_held = next(index for index, num_tokens in enumerate(sizes) if num_tokens > 1)
    assert (num_held >= 2) is (tpot_s is not None or own_s > 0.0)


def test_what_was_measured_before_the_first_step_is_known_from_then_on() -> None:
    measured = [MeasuredStep(StepWork(num, 20 * num), 0.01 * num) for num in range(1, 25)]
    runner = GatedRunner()
    rig = EngineRig(lambda scheduler: StepEngine(scheduler, runner, measured=measured))
    model = rig.engine.step_model
    assert model.decode.expected_s(StepWork(8, 160)) == pytest.approx(0.08, rel=0.02)
    assert model.decode.is_known
    assert not model.prefill.is_known


async def test_a_step_in_flight_is_predicted_by_all_that_it_computes() -> None:
    rig = Rig()
    cost = StepCost(fixed_s=1.0, attention_pair_s=0.5, upper_ratio=2.0, num_steps=NUM_KNOWN_STEPS)
    rig.engine._learner = Known(StepModel(cost, cost))
    rig.runner.gate.clear()
    async with rig.running():
        seq = rig.start(4, max_tokens=2)
        await until_set(rig.runner.began)
        predicted_s = rig.engine.predicted_step_s
        rig.runner.gate.set()
        await rig.until_finished(seq)
    assert predicted_s == pytest.approx(2.0 * (1.0 + 0.5 * (1 + 2 + 3 + 4)))
    assert rig.engine.predicted_step_s == pytest.approx(2.0)
