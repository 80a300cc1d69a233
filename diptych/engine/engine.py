"""The loop that turns scheduler and runner into tokens.

Thin asyncio shell: decide a step, run it on the model thread, book it, tell the
listener. Knows nothing of requests, leases or wires.
"""

from collections.abc import Callable
from concurrent.futures import Executor
from typing import NamedTuple, Protocol

from diptych.engine.scheduler import Scheduler
from diptych.engine.step import SequenceUpdate, StepOutput, StepPlan


class StepRunner(Protocol):
    """Executes a plan. Called on the model thread, one plan at a time."""

    def execute(self, plan: StepPlan) -> StepOutput: ...


class StepRecord(NamedTuple):
    """One completed step."""

    started_s: float  # clock when it was handed to the model thread
    num_prefill_tokens: int
    num_decode_tokens: int
    duration_s: float  # on the model thread
    overhead_s: float  # scheduling, booking and thread hops around it


class Engine:
    """One engine: one scheduler, one runner, one model thread.

    Everything here is for the event loop's thread.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        on_step: Callable[[list[SequenceUpdate]], None],
        *,
        model_thread: Executor | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """``on_step`` is called after each step, before the next is decided.

        It may call the scheduler (release, start). ``model_thread`` is an executor
        with one thread, the caller's to shut down; without it ``run`` makes one.
        """
        raise NotImplementedError

    num_steps: int  # completed
    last_step: StepRecord | None  # set before on_step is called
    failed: bool  # run() ended with an error

    async def run(self) -> None:
        """Run steps until cancelled; sleeps when nothing can run.

        Whatever the runner or ``on_step`` raises ends it: the process must go down.
        On cancellation it waits for the step in flight, whose memory it uses.
        """
        raise NotImplementedError

    def wake(self) -> None:
        """Something may be able to run: after add_prefill, start, release, end_quarantine."""
        raise NotImplementedError

    @property
    def step_due(self) -> bool:
        """Whether ``num_steps`` must advance: a step is in flight or about to be decided."""
        raise NotImplementedError

    @property
    def predicted_step_s(self) -> float:
        """Expected duration of the step in flight (else of the last one); 0 until known."""
        raise NotImplementedError

    @property
    def prefill_tokens_per_s(self) -> float:
        """Moving average over steps that are mostly prefill; 0 until known."""
        raise NotImplementedError

    @property
    def decode_step_s(self) -> float:
        """Moving average of steps without prefill chunks; 0 until known."""
        raise NotImplementedError

    @property
    def overhead_s(self) -> float:
        """Moving average of what a step costs beside the model, s; 0 until known."""
        raise NotImplementedError
