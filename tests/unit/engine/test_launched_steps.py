"""The engine's loop over a device that is given the next step before it is done with this one."""

import asyncio
import math
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from diptych.engine.engine import StepEngine
from diptych.engine.scheduling.block_pool import BlockPool
from diptych.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from diptych.engine.scheduling.sequence import Sequence, SequenceKey, SequenceState
from diptych.engine.scheduling.step import SampledToken, SequenceUpdate, StepOutput, StepPlan
from diptych.errors import DeviceLostError, StepFailedError
from diptych.finish_reason import FinishReason
from diptych.sampling_params import SamplingParams


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


class Rig:
    def __init__(self) -> None:
        config = SchedulerConfig(max_model_len=60, max_batched_tokens=16, max_num_seqs=8)
        self.pool = BlockPool(16, 4)
        self.device = Device()
        self.device.gate.set()
        scheduler = Scheduler(config, self.pool)
        self.engine = StepEngine(scheduler, self.device, launcher=self.device)
        self.updates: list[SequenceUpdate] = []
        self.stepped = asyncio.Event()
        self.engine.subscribe(self._listen)

    def _listen(self, updates: list[SequenceUpdate]) -> None:
        self.updates += updates
        self.stepped.set()

    def start(self, num_prompt_tokens: int, max_tokens: int) -> Sequence:
        seq = Sequence(
            key=SequenceKey("router", num_prompt_tokens),
            token_ids=[1] * num_prompt_tokens,
            num_prompt_tokens=num_prompt_tokens,
            sampling=SamplingParams(max_tokens=max_tokens),
        )
        self.engine.reserve(seq)
        self.engine.start(seq, [], compute_missing=True)
        return seq

    async def until_finished(self, seq: Sequence) -> None:
        while seq.state is not SequenceState.FINISHED:
            self.stepped.clear()
            await self.stepped.wait()

    async def until_waiting(self) -> None:
        assert await asyncio.get_running_loop().run_in_executor(None, self.device.waiting.wait, 5)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(self.engine.run(), name="engine")
            yield task
            if not task.cancelling():
                task.cancel()


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
