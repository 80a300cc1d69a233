"""The engine's loop over a device that is given the next step before it is done with this one."""

import asyncio
import math
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

from diptych.engine.engine import StepEngine
from diptych.engine.scheduling.pacer import Pacer
from diptych.engine.scheduling.sequence import Sequence
from diptych.engine.scheduling.step import SampledToken, StepOutput, StepPlan
from diptych.errors import DeviceLostError, StepFailedError
from diptych.finish_reason import FinishReason
from diptych.step_model import StepModel, StepWork
from tests.unit.engine.engine_rig import EngineRig


@dataclass
class Device:
    """Draws 7 each time, once its gate is open; steps have numbers."""

    said: list[str] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    waiting: threading.Event = field(default_factory=threading.Event)
    broken: dict[str, Exception] = field(default_factory=dict)  # by what is done with a step
    num_launched: int = 0

    def execute(self, plan: StepPlan) -> StepOutput:
        raise AssertionError("steps are launched")

    def launch(self, plan: StepPlan) -> "Launched":
        launched = Launched(self, self.num_launched, plan)
        self.num_launched += 1
        self.do(f"launch {launched.number}")
        return launched

    def do(self, what: str) -> None:
        self.said.append(what)
        if what in self.broken:
            raise self.broken[what]


@dataclass
class Launched:
    device: Device
    number: int
    plan: StepPlan

    def wait(self) -> StepOutput:
        self.device.waiting.set()
        self.device.gate.wait()
        self.device.do(f"wait {self.number}")
        chunks = self.plan.chunks
        tokens = tuple(SampledToken(7, math.nan) if chunk.sample else None for chunk in chunks)
        return StepOutput(tokens=tokens, duration_s=0.5)


class Rig(EngineRig):
    def __init__(self) -> None:
        self.device = Device()
        self.device.gate.set()
        super().__init__(lambda scheduler: StepEngine(scheduler, self.device, launcher=self.device))

    async def until_waiting(self) -> None:
        assert await asyncio.get_running_loop().run_in_executor(None, self.device.waiting.wait, 5)


async def test_each_step_is_launched_before_the_one_in_flight_is_waited_for() -> None:
    rig = Rig()
    async with rig.running():
        seq = rig.start(3, max_tokens=4)
        await rig.until_finished(seq)
        await asyncio.sleep(0)
        assert not rig.engine.step_due
        await rig.until_finished(rig.start(4, max_tokens=1))
    assert rig.device.said == [
        *("launch 0", "launch 1", "wait 0", "launch 2", "wait 1", "launch 3", "wait 2", "wait 3"),
        *("launch 4", "wait 4"),
    ]
    assert [update.position for update in rig.updates] == [3, 4, 5, 6, 4]
    assert rig.updates[3].finish_reason is FinishReason.LENGTH
    assert rig.engine.num_steps == 5
    assert rig.pool.counts().running == 0
    assert rig.engine.step_model.decode.num_steps == 3


async def test_prompts_in_a_step_that_is_launched_have_begun() -> None:
    """Behind one that only decodes: what comes now is in neither."""
    rig = Rig()
    rig.engine.subscribe(lambda updates: rig.device.gate.clear())
    async with rig.running():
        first = rig.start(3, max_tokens=9, token_id=1)
        while first.num_output_tokens < 2:
            rig.device.gate.set()
            await asyncio.sleep(0.001)
        second = rig.start(3, max_tokens=1, token_id=2)
        assert (rig.engine.prefill_age_s or 1.0) < 0.0
        rig.device.gate.set()  # for one step
        async with asyncio.timeout(10.0):
            while rig.engine.prefill_age_s != 0.0:
                await asyncio.sleep(0.001)
        while first.num_output_tokens < 9:
            rig.device.gate.set()
            await asyncio.sleep(0.001)
        assert second.num_output_tokens == 1


async def test_a_launch_that_fails_ends_its_sequences_after_the_step_in_flight() -> None:
    rig = Rig()
    rig.device.broken["launch 1"] = RuntimeError("broken")
    async with rig.running():
        seq = rig.start(3, max_tokens=4)
        await rig.until_finished(seq)
        assert [update.token is not None for update in rig.updates] == [True, False]
        assert isinstance(rig.updates[-1].error, StepFailedError)
        await rig.until_finished(rig.start(4, max_tokens=2))
    assert rig.device.said[:4] == ["launch 0", "launch 1", "wait 0", "launch 2"]
    assert rig.pool.counts().running == 0


async def test_a_step_that_fails_takes_the_rows_ahead_with_it() -> None:
    rig = Rig()
    rig.device.broken["wait 0"] = RuntimeError("broken")
    async with rig.running():
        seq = rig.start(3, max_tokens=4)
        await rig.until_finished(seq)
        assert seq.num_output_tokens == 0
        assert rig.pool.counts().running > 0, "the step ahead has them"
        await rig.until_finished(rig.start(4, max_tokens=2))
    assert [update.error is not None for update in rig.updates] == [True, False, False]
    assert rig.pool.counts().running == 0


async def test_a_lost_device_ends_the_loop_when_nothing_is_in_flight() -> None:
    rig = Rig()
    rig.device.broken = {f"wait {at}": DeviceLostError("broken") for at in range(2)}
    rig.start(3, max_tokens=4)
    with pytest.raises(DeviceLostError, match="broken"):
        await rig.engine.run()
    assert rig.device.said == ["launch 0", "launch 1", "wait 0", "wait 1"]


async def test_cancelling_waits_for_both_steps_and_frees_what_was_released() -> None:
    rig = Rig()
    rig.device.gate.clear()
    async with rig.running() as task:
        seq = rig.start(3, max_tokens=9)
        await rig.until_waiting()
        rig.engine.release(seq)
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not task.done()
        rig.device.gate.set()
    assert rig.device.said == ["launch 0", "launch 1", "wait 0", "wait 1"]
    assert rig.pool.counts().free == 16


async def test_cancelling_does_not_wait_for_steps_that_are_given_up() -> None:
    rig = Rig()
    rig.device.gate.clear()
    try:
        async with rig.running() as task:
            seq = rig.start(3, max_tokens=9)
            await rig.until_waiting()
            rig.engine.release(seq)
            rig.engine.abandon()
            task.cancel()
        assert rig.pool.counts().running == 2, "the steps may still write them"
    finally:
        rig.device.gate.set()


@dataclass
class TimedDevice:
    """By a clock that only waiting moves: a step takes something by itself, and per token."""

    now_s: float = 0.0
    begins_s: list[float] = field(default_factory=list)  # when each step began
    free_s: float = 0.0  # when the last one ends

    def execute(self, plan: StepPlan) -> StepOutput:
        raise AssertionError("steps are launched")

    def launch(self, plan: StepPlan) -> "TimedLaunched":
        begin_s = max(self.now_s, self.free_s)
        self.begins_s.append(begin_s)
        self.free_s = begin_s + 0.05 + 0.01 * plan.num_tokens
        return TimedLaunched(self, plan, self.free_s - begin_s, self.free_s)


@dataclass
class TimedLaunched:
    device: TimedDevice
    plan: StepPlan
    duration_s: float
    end_s: float

    def wait(self) -> StepOutput:
        self.device.now_s = max(self.device.now_s, self.end_s)
        tokens = tuple(
            SampledToken(7, math.nan) if chunk.sample else None for chunk in self.plan.chunks
        )
        return StepOutput(tokens=tokens, duration_s=self.duration_s)


class Asked(Pacer):
    """Notes the time that it is told."""

    def __init__(self, device: TimedDevice) -> None:
        super().__init__(1.0, 16)
        self._device = device
        self.told: dict[int, float] = {}  # at last, by the step's number

    def max_prompt_tokens(
        self,
        decoding: Iterable[Sequence],
        runnable: Iterable[Sequence],
        work: StepWork,
        model: StepModel,
        now_s: float,
    ) -> int | None:
        self.told[len(self._device.begins_s)] = now_s
        return None


async def test_a_promised_pace_is_told_when_the_step_that_is_decided_will_begin() -> None:
    device = TimedDevice()
    rig = EngineRig(
        lambda scheduler: StepEngine(scheduler, device, launcher=device, clock=lambda: device.now_s)
    )
    asked = rig.engine._pacer = Asked(device)
    async with rig.running():
        first = rig.start(20, max_tokens=12)  # steps of 16, 4 and of 1, until the others come
        while len(device.begins_s) < 8:
            rig.stepped.clear()
            await rig.stepped.wait()
        for number in (1, 2, 3):
            await rig.until_finished(rig.start(30 + number, max_tokens=4))
        await rig.until_finished(first)
    late_s = [
        told_s - device.begins_s[step]
        for step, told_s in asked.told.items()
        if 3 <= step < rig.engine.num_steps
    ]
    assert len(late_s) > 10
    assert late_s == pytest.approx([0.0] * len(late_s), abs=1e-6)


async def test_a_pace_counts_a_hold_for_each_step_and_not_for_each_question() -> None:
    """Where a token has to be seen, what is asked ahead of it comes to nothing."""
    rig = Rig()
    engine = rig.engine
    engine._pacer = pacer = Pacer(10.0, 16)
    for _ in range(30):
        engine._learner.learn(StepWork(1, 10), 0.5)
        engine._learner.learn(StepWork(0, 0, 8, 36), 1e6)
    async with rig.running():
        rig.start(3, max_tokens=30, return_margins=True)
        while engine.num_steps < 2:
            rig.stepped.clear()
            await rig.stepped.wait()
        num_before = engine.num_steps
        rig.start(12, max_tokens=2)
        while engine.num_steps < num_before + 10:
            rig.stepped.clear()
            await rig.stepped.wait()
        assert pacer._num_held <= engine.num_steps - num_before + 1
