"""Nothing is announced, cached, freed or sampled before the device has completed the step.

The real engine over a device that is asynchronous, like a GPU: what a step writes is first
spoilt and then written some time after it was asked for, so that whoever looked too early saw
garbage, and whoever got the block meanwhile finds garbage in it. Over one that is given a step
while another is in flight, tokens are on the device before the host knows them; when the thread
gets to launching and waiting, and the device to computing, is anybody's guess.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from diptych.engine.engine import StepEngine
from diptych.engine.model_thread import LaunchedStep
from diptych.engine.scheduling.audit import pool_mismatch
from diptych.engine.scheduling.block_pool import BlockPool
from diptych.engine.scheduling.scheduler import MAX_STEPS_IN_FLIGHT, Scheduler, SchedulerConfig
from diptych.engine.scheduling.sequence import Sequence, SequenceKey, SequenceState
from diptych.engine.scheduling.step import SequenceUpdate, StepOutput, StepPlan
from diptych.errors import BlocksExhaustedError
from diptych.sampling_params import SamplingParams
from tests.protocol.fake_model import STOP_TOKEN, Memory, answer, slots_of
from tests.protocol.invariants import Watch

BLOCK_SIZE, NUM_BLOCKS, MAX_LEN, MAX_TOKENS = 2, 12, 16, 3
_TURNS = 8  # of the event loop, until nothing is left to do


@dataclass
class LateDevice:
    """Does what it was asked for in order, one thing at a time, when the test says so."""

    memory: Memory
    asked: deque[Callable[[], None]] = field(default_factory=deque)
    plans: deque[StepPlan] = field(default_factory=deque)  # not complete
    drawn: tuple[Any, ...] = ()  # by the last step that is complete

    def ask(self, plan: StepPlan, sequences: tuple[Sequence, ...]) -> "Future[StepOutput]":
        """Queue a step; its result, once it is complete."""
        completed: Future[StepOutput] = Future()

        def finish() -> None:
            output = self.memory.execute(self.known(plan), sequences)
            self.drawn = output.tokens
            self.plans.popleft()
            completed.set_result(output)

        self.plans.append(plan)
        self.asked += (lambda: self.memory.begin(plan, sequences), finish)
        return completed

    def known(self, plan: StepPlan) -> StepPlan:
        """With the tokens that the step before it has drawn."""
        chunks = [
            chunk
            if chunk.follows is None
            else replace(chunk, token_ids=(self.drawn[chunk.follows].token_id,))
            for chunk in plan.chunks
        ]
        return StepPlan(chunks=tuple(chunks))

    @property
    def unfinished_block_ids(self) -> set[int]:
        """Blocks that it still writes."""
        return {block_id for plan in self.plans for block_id in self.memory.written_by(plan)}

    @property
    def read_block_ids(self) -> set[int]:
        """Blocks that it may still read."""
        chunks = (chunk for plan in self.plans for chunk in plan.chunks)
        return {block_id for chunk in chunks for block_id in chunk.block_table}


class ModelThread(Executor):
    """Hands plans to the device and returns when that is done: what a StepRunner promises."""

    def __init__(self, device: LateDevice, scheduler: Scheduler) -> None:
        self.device = device
        self.scheduler = scheduler
        self.jobs: deque[Callable[[], bool]] = deque()  # each says whether it is over

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        (plan,) = args
        return self.device.ask(plan, self.scheduler.owners(plan))


class HastyModelThread(ModelThread):
    """Does not wait for a step that draws nothing: there is no result to wait for."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        (plan,) = args
        completed = super().submit(fn, plan)
        if any(chunk.sample is not None for chunk in plan.chunks):
            return completed
        returned: Future[StepOutput] = Future()
        returned.set_result(StepOutput(tokens=(None,) * len(plan.chunks), duration_s=0.0))
        return returned


class LaunchingThread(ModelThread):
    """Launches and waits, one job after another, when the test lets it."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        done: Future[Any] = Future()

        def launch() -> bool:
            (plan,) = args
            completed = self.device.ask(plan, self.scheduler.owners(plan))
            done.set_result(_Launched(plan, completed))
            return True

        def wait() -> bool:
            completed = fn.__self__.completed  # type: ignore[attr-defined]
            if completed.done():
                done.set_result(completed.result())
            return completed.done()  # type: ignore[no-any-return]

        self.jobs.append(launch if args else wait)
        return done

    def get_on(self) -> None:
        """With its oldest job, if that does not wait."""
        if self.jobs[0]():
            self.jobs.popleft()


class HastyLaunchingThread(LaunchingThread):
    """Does not wait for a step that draws nothing: there is no result to wait for."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        if args:
            return super().submit(fn, *args)
        chunks = fn.__self__.plan.chunks  # type: ignore[attr-defined]
        if any(chunk.sample is not None for chunk in chunks):
            return super().submit(fn)
        returned: Future[StepOutput] = Future()
        returned.set_result(StepOutput(tokens=(None,) * len(chunks), duration_s=0.0))
        return returned


@dataclass
class _Launched:
    """Implements ``LaunchedStep``, but that the thread waits for it."""

    plan: StepPlan
    completed: "Future[StepOutput]"

    def wait(self) -> StepOutput:
        raise AssertionError("the model thread does not call it")


class _NoRunner:
    def execute(self, plan: StepPlan) -> StepOutput:
        raise AssertionError("the model thread does not call it")

    def launch(self, plan: StepPlan) -> LaunchedStep:
        raise AssertionError("the model thread does not call it")


class DeviceMachine(RuleBasedStateMachine):
    """Sequences come, run and go; the device gets on whenever it likes."""

    model_thread: type[ModelThread] = ModelThread
    launches = False

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        config = SchedulerConfig(max_num_seqs=3, max_batched_tokens=4, max_model_len=MAX_LEN)
        self.scheduler = Scheduler(config, self.pool)
        self.device = LateDevice(Memory(NUM_BLOCKS, BLOCK_SIZE, Watch()))
        self.thread = self.model_thread(self.device, self.scheduler)
        runner = _NoRunner()
        self.engine = StepEngine(
            self.scheduler,
            runner,
            launcher=runner if self.launches else None,
            model_thread=self.thread,
        )
        self.engine.subscribe(self.on_step)
        self.loop = asyncio.new_event_loop()
        self.running = self.loop.create_task(self.engine.run())
        self.live: list[Sequence] = []
        self.num_made = 0
        self.turn()

    def turn(self) -> None:
        """Let the event loop do all that it can."""
        self.turn_cancelled()
        if self.running.done():
            self.running.result()

    def turn_cancelled(self) -> None:
        for _ in range(_TURNS):
            self.loop.run_until_complete(asyncio.sleep(0))

    def on_step(self, updates: list[SequenceUpdate]) -> None:
        """What readers are offered, and clients get, is in the device's memory."""
        for update in updates:
            seq = update.sequence
            if seq.state is not SequenceState.FINISHED:  # nothing of that one is offered
                self.check_offered(seq, update.num_computed_tokens)
            prompt = seq.token_ids[: seq.num_prompt_tokens]
            tokens, _ = answer(prompt, MAX_TOKENS)
            assert seq.token_ids[len(prompt) :] == tokens[: seq.num_output_tokens], "drew too early"
            if seq.state is SequenceState.FINISHED:
                self.live.remove(seq)

    def check_offered(self, seq: Sequence, num_tokens: int) -> None:
        for position, slot in enumerate(slots_of(seq.token_ids[:num_tokens])):
            index, offset = divmod(position, BLOCK_SIZE)
            found = self.device.memory.slot(seq.block_table[index], offset)
            assert found == slot, "announced before it was there"

    @rule(shared=st.integers(0, 8), own=st.integers(1, 4), prefill_only=st.booleans())
    def add(self, shared: int, own: int, prefill_only: bool) -> None:
        self.num_made += 1
        prompt = [1] * shared + [own] * own
        seq = Sequence(
            key=SequenceKey("router", self.num_made),
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=SamplingParams(max_tokens=MAX_TOKENS, stop_token_ids=frozenset({STOP_TOKEN})),
            prefill_only=prefill_only,
        )
        try:
            if prefill_only:
                self.engine.add_prefill(seq)
            else:
                self.engine.reserve(seq)
                self.engine.start(seq, [], compute_missing=True)
        except BlocksExhaustedError:
            return
        self.live.append(seq)
        self.turn()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.live))
        self.live.remove(seq)
        self.engine.release(seq)
        self.turn()

    @precondition(lambda self: self.device.asked)
    @rule()
    def device_gets_on(self) -> None:
        self.device.asked.popleft()()
        self.turn()

    @invariant()
    def nobody_has_what_the_device_writes(self) -> None:
        for block_id in self.device.unfinished_block_ids:
            assert self.pool.key_of(block_id) is None, "shared before it was there"
        for block_id in self.device.read_block_ids:
            assert self.pool.holders(block_id), "freed before the device was done with it"
        mismatch = pool_mismatch(self.pool, self.scheduler)
        assert mismatch is None, mismatch

    def teardown(self) -> None:
        self.running.cancel()
        for seq in self.live:
            self.scheduler.release(seq)
        self.turn_cancelled()
        while self.device.asked or self.thread.jobs:
            while self.device.asked:
                self.device.asked.popleft()()
            if self.thread.jobs and self.thread.jobs[0]():
                self.thread.jobs.popleft()
            self.turn_cancelled()
        self.turn_cancelled()
        self.loop.close()
        counts = self.pool.counts()
        assert counts.free + counts.cached == counts.total


class AheadMachine(DeviceMachine):
    """Over a device that is given the next step before it is done with the one it has."""

    model_thread = LaunchingThread
    launches = True

    @precondition(lambda self: self.thread.jobs)
    @rule()
    def thread_gets_on(self) -> None:
        assert isinstance(self.thread, LaunchingThread)
        self.thread.get_on()
        self.turn()
        assert len(self.device.plans) <= MAX_STEPS_IN_FLIGHT


class HastyMachine(DeviceMachine):
    """The same over a runner that breaks its promise."""

    model_thread = HastyModelThread

    def teardown(self) -> None:
        self.running.cancel()
        self.engine.abandon()
        for _ in range(_TURNS):
            self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()


class HastyAheadMachine(AheadMachine):
    """The same, two steps at a time."""

    model_thread = HastyLaunchingThread
    teardown = HastyMachine.teardown


TestDevice = DeviceMachine.TestCase
TestDevice.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

TestAheadDevice = AheadMachine.TestCase
TestAheadDevice.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


@pytest.mark.parametrize("machine", [HastyMachine, HastyAheadMachine])
def test_a_runner_that_returns_early_is_found_out(machine: type[DeviceMachine]) -> None:
    unchecked = settings(
        max_examples=200,
        stateful_step_count=10,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises(AssertionError, match="before it was there"):
        run_state_machine_as_test(machine, settings=unchecked)
