"""Steps on the model thread: begun in order, ended in order, one or two at a time.

Futures and nothing else: what is decided, and what came of it, is the engine's.
"""

import asyncio
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol, TypeVar

from diptych.engine.scheduling.step import StepOutput, StepPlan

_T = TypeVar("_T")


class StepRunner(Protocol):
    """Executes a plan. Called on the model thread, one plan at a time."""

    def execute(self, plan: StepPlan) -> StepOutput:
        """Run the step, and return once the *device* has completed it.

        Then all KV of the plan's tokens is in its blocks for whoever reads that memory, and
        nothing of the step still reads or writes any block, whether it drew tokens or not: what
        it computed is announced, cached and freed on the return alone.

        Raises DeviceLostError; any other error is of this step's sequences (DeviceMemoryError:
        of their number and size). It, too, is raised only when nothing of the step is at work.
        """
        ...


class LaunchedStep(Protocol):
    """A step that a device was asked for. Model thread."""

    def wait(self) -> StepOutput:
        """Return when the device has completed it: what StepRunner promises of ``execute``.

        Steps are waited for in the order in which they were launched. Raises as ``execute``.
        """
        ...


class StepLauncher(Protocol):
    """A runner over a device that does one thing after another, whoever waits for it."""

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Ask the device for the step, behind those that it was asked for before.

        A chunk that follows one of the plan launched before takes that one's token on the device.
        Raises as ``StepRunner.execute``.
        """
        ...


@dataclass(slots=True, eq=False)
class BegunStep:
    """A step, from its decision to its booking. Times by the engine's clock."""

    plan: StepPlan
    started_s: float  # when the model thread was given it
    launched: asyncio.Future[LaunchedStep] | None  # None: it is executed at one go
    completed: asyncio.Future[StepOutput] | None

    @property
    def has_failed(self) -> bool:
        """Whether the device was never asked for all of it."""
        launched = self.launched
        return launched is not None and launched.done() and launched.exception() is not None


class GivenUpError(Exception):
    """The step will never end."""


class ModelThread:
    """The one thread on which a runner lives. Event loop only."""

    def __init__(self, thread: Executor | None, runner: StepRunner, launcher: StepLauncher | None):
        """``launcher``: steps may be begun while others are in flight; None: one at a time."""
        self._thread, self._runner, self._launcher = thread, runner, launcher

    def begin(self, plan: StepPlan, started_s: float) -> BegunStep:
        """Give the plan to the thread; returns at once."""
        loop = asyncio.get_running_loop()
        if self._launcher is None:
            completed = loop.run_in_executor(self._thread, self._runner.execute, plan)
            return BegunStep(plan, started_s, None, completed)
        launched = loop.run_in_executor(self._thread, self._launcher.launch, plan)
        return BegunStep(plan, started_s, launched, None)

    async def end(
        self, step: BegunStep, given_up: "asyncio.Future[None] | None" = None
    ) -> StepOutput:
        """Wait for the oldest step in flight. May be cancelled, and called again then.

        Raises what the step did; GivenUpError when ``given_up`` is done before the step.
        """
        if step.completed is None:
            assert step.launched is not None, "neither executed nor launched"
            launched = await _result(step.launched, given_up)
            loop = asyncio.get_running_loop()
            step.completed = loop.run_in_executor(self._thread, launched.wait)
        return await _result(step.completed, given_up)


async def _result(job: "asyncio.Future[_T]", given_up: "asyncio.Future[None] | None") -> _T:
    """What the job returns or raises. Being cancelled does not end it."""
    if given_up is None:
        return await asyncio.shield(job)
    ends: set[asyncio.Future[_T] | asyncio.Future[None]] = {job, given_up}
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    if not job.done():
        raise GivenUpError
    return job.result()
