"""A device that does what it was asked for some time later, and the model thread over it.

What a step writes is first spoilt and then written, so that whoever looked too early saw garbage,
and whoever got the block meanwhile finds garbage in it. Over one that is given a step while another
is in flight, tokens are on the device before the host knows them.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from typing import Any

from diptych.engine.model_thread import LaunchedStep
from diptych.engine.scheduling.block_pool import BlockPool
from diptych.engine.scheduling.run_ahead import awaited
from diptych.engine.scheduling.scheduler import Scheduler
from diptych.engine.scheduling.sequence import Sequence
from diptych.engine.scheduling.step import SampledToken, StepOutput, StepPlan
from diptych.errors import DeviceMemoryError
from tests.protocol.fake_model import Memory

GARBAGE = SampledToken(0, float("nan"))  # what the host's memory has before the device filled it


@dataclass
class LateDevice:
    """Does what it was asked for in order, one thing at a time, when the test says so."""

    memory: Memory
    pool: BlockPool
    asked: deque[Callable[[], None]] = field(default_factory=deque)
    plans: deque[StepPlan] = field(default_factory=deque)  # not complete
    # Decided and not complete, asked for or not: with what generations of their blocks.
    decided: dict[int, tuple[StepPlan, list[int]]] = field(default_factory=dict)
    last: StepPlan | None = None  # that was asked for
    drawn: tuple[Any, ...] = ()  # by the last step that is complete

    def expect(self, plan: StepPlan) -> None:
        """The thread has it, and will ask for it."""
        self.decided[id(plan)] = plan, self._generations(plan)

    def forget(self, plan: StepPlan) -> None:
        del self.decided[id(plan)]

    def ask(self, plan: StepPlan, sequences: tuple[Sequence, ...]) -> "Future[StepOutput]":
        """Queue a step; its result, once it is complete."""
        self._check_follows(plan)
        self.last = plan
        completed: Future[StepOutput] = Future()

        def finish() -> None:
            output = self.memory.execute(self.known(plan), sequences)
            self.drawn = output.tokens
            self.plans.popleft()
            self.forget(plan)
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

    def _check_follows(self, plan: StepPlan) -> None:
        """It has the tokens from which a plan goes on."""
        places = [chunk.follows for chunk in plan.chunks if chunk.follows is not None]
        assert not places or self.last is not None, "follows a step that never was"
        for place in places:
            assert self.last is not None
            sample = self.last.chunks[place].sample
            assert sample is not None, "follows a chunk that draws nothing"
            reason = awaited(sample.params)
            assert reason is None, "follows a token that the host draws"

    @property
    def unfinished_block_ids(self) -> set[int]:
        """Blocks that it still writes."""
        return {block_id for plan in self.plans for block_id in self.memory.written_by(plan)}

    @property
    def read_block_ids(self) -> set[int]:
        """Blocks that it may still read, or will."""
        chunks = (chunk for plan, _ in self.decided.values() for chunk in plan.chunks)
        return {block_id for chunk in chunks for block_id in chunk.block_table}

    @property
    def has_own_blocks(self) -> bool:
        """Whether nobody was handed out again what it has."""
        return all(self._generations(plan) == then for plan, then in self.decided.values())

    def _generations(self, plan: StepPlan) -> list[int]:
        tables = (chunk.block_table for chunk in plan.chunks)
        return [self.pool.generation(block_id) for table in tables for block_id in table]


@dataclass
class Faults:
    """What goes wrong with the next step that is begun, or waited for."""

    launching: bool = False
    waiting: bool = False

    def take(self, what: str) -> DeviceMemoryError | None:
        if not getattr(self, what):
            return None
        setattr(self, what, False)
        return DeviceMemoryError(f"out of memory: {what}")


class ModelThread(Executor):
    """Hands plans to the device and returns when that is done: what a StepRunner promises."""

    def __init__(self, device: LateDevice, scheduler: Scheduler) -> None:
        self.device = device
        self.scheduler = scheduler
        self.faults = Faults()
        self.jobs: deque[Callable[[], bool]] = deque()  # each says whether it is over

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        (plan,) = args
        self.device.expect(plan)
        return self.device.ask(plan, self.scheduler.owners(plan))

    def get_on(self) -> None:
        """With its oldest job, if that does not wait."""
        if self.jobs[0]():
            self.jobs.popleft()


class LaunchingThread(ModelThread):
    """Launches and waits, one job after another, when the test lets it."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        done: Future[Any] = Future()

        def launch() -> bool:
            (plan,) = args
            error = self.faults.take("launching")
            if error is not None:
                self.device.forget(plan)
                done.set_exception(error)
            else:
                completed = self.device.ask(plan, self.scheduler.owners(plan))
                done.set_result(_Launched(plan, completed))
            return True

        def wait() -> bool:
            completed = _launched(fn).completed
            if completed.done():
                error = self.faults.take("waiting")
                if error is None:
                    done.set_result(completed.result())
                else:
                    done.set_exception(error)
            return completed.done()

        if args:
            self.device.expect(args[0])
        self.jobs.append(launch if args else wait)
        return done


class HastyLaunchingThread(LaunchingThread):
    """Does not wait for a step that draws nothing: there is no result to wait for."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        if args or draws(_launched(fn).plan):
            return super().submit(fn, *args)
        return _returned(_launched(fn).plan)


class ReadingEarlyThread(LaunchingThread):
    """Reads the tokens out of the host's memory without waiting for the device to fill it."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        return super().submit(fn, *args) if args else _returned(_launched(fn).plan)


def draws(plan: StepPlan) -> bool:
    """Whether the step draws a token."""
    return any(chunk.sample is not None for chunk in plan.chunks)


def _returned(plan: StepPlan) -> "Future[StepOutput]":
    """At once, whatever the device does."""
    returned: Future[StepOutput] = Future()
    tokens = tuple(None if chunk.sample is None else GARBAGE for chunk in plan.chunks)
    returned.set_result(StepOutput(tokens=tokens, duration_s=0.0))
    return returned


@dataclass
class _Launched:
    """Implements ``LaunchedStep``, but that the thread waits for it."""

    plan: StepPlan
    completed: "Future[StepOutput]"

    def wait(self) -> StepOutput:
        raise AssertionError("the model thread does not call it")


def _launched(wait: Callable[..., Any]) -> _Launched:
    step = wait.__self__  # type: ignore[attr-defined]
    assert isinstance(step, _Launched)
    return step


class NoRunner:
    """Its methods name the jobs of the threads above."""

    def execute(self, plan: StepPlan) -> StepOutput:
        raise AssertionError("the model thread does not call it")

    def launch(self, plan: StepPlan) -> LaunchedStep:
        raise AssertionError("the model thread does not call it")
