"""The loop that turns scheduler and runner into tokens.

Thin asyncio shell: decide a step, run it on the model thread, book it, tell the
listeners. Over a device that computes while nobody waits for it, the next step is decided and
launched before the one in flight is waited for. Knows nothing of requests, leases or wires.
"""

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from diptych.cache_log import CacheLog
from diptych.engine.model_thread import (
    BegunStep,
    GivenUpError,
    ModelThread,
    StepLauncher,
    StepRunner,
)
from diptych.engine.protocol import EngineLoad, StepListener, StepRecord
from diptych.engine.scheduling.audit import pool_mismatch
from diptych.engine.scheduling.beside_others import BesideOthers
from diptych.engine.scheduling.block_pool import BlockPool
from diptych.engine.scheduling.pacer import Pacer
from diptych.engine.scheduling.prefill_time import PrefillTime
from diptych.engine.scheduling.scheduler import MAX_STEPS_IN_FLIGHT, Scheduler
from diptych.engine.scheduling.sequence import Sequence
from diptych.engine.scheduling.step import SequenceUpdate, StepOutput, StepPlan
from diptych.engine.scheduling.step_forecast import forecast_s
from diptych.engine.scheduling.step_learner import StepLearner, num_told, tells_much, work_of
from diptych.engine.scheduling.step_timing import StepTiming
from diptych.engine.scheduling.telling_time import TellingTime
from diptych.engine.scheduling.yielding import ShortSteps
from diptych.errors import DeviceLostError, DeviceMemoryError, StepFailedError
from diptych.paced import Paced
from diptych.sampling_params import SamplingParams
from diptych.step_model import MeasuredStep, StepModel, StepWork

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3  # in a row: then it is not the sequences
MAX_STEPS_OUT_OF_MEMORY = 16  # in a row: then it is not their size; a smaller one would have passed


class StepEngine:
    """Our engine (diptych.engine.protocol.Engine): one scheduler, one runner, one model thread.

    What a caller's sequence needs is done by the scheduler; this runs the steps, and
    wakes up when there may be one to run.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        *,
        launcher: StepLauncher | None = None,
        model_thread: Executor | None = None,
        measured: Collection[MeasuredStep] = (),
        prepare: Callable[[SamplingParams], Future[Any] | None] = lambda params: None,
        tpot_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``launcher``, of the same runner: steps are planned ahead and launched by it.

        ``model_thread`` has one thread, the caller's to shut down; without it ``run`` makes one.

        ``measured`` are steps that were run before the first one, to learn from. ``prepare``
        is told of each new sequence's parameters, to begin elsewhere what they will need: the
        sequence gets no step before that is done.
        ``tpot_s`` is the time between tokens that parts of prompts in the same steps must leave
        to all that decode; what sequences bring of their own counts beside it (pacer.py).
        """
        self.num_steps = 0  # completed
        self.last_step: StepRecord | None = None  # set before listeners are told; None: it failed
        self._scheduler = scheduler
        self._runner, self._launcher = runner, launcher
        self._prepare = prepare
        self._pool: BlockPool = scheduler.pool
        self._listeners: dict[object, StepListener] = {}  # in the order in which they came
        self._model_thread = model_thread
        self._clock = clock
        self._awake = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None  # of a run
        self._abandoned: asyncio.Future[None] | None = None  # of a run under way
        self._last_plan = StepPlan(chunks=())  # that was waited for
        self._num_failed = 0  # steps in a row, for whatever reason but this:
        self._num_out_of_memory = 0
        self._steps: deque[BegunStep] = deque()  # in flight, the oldest first
        self._max_steps = 1 if launcher is None else MAX_STEPS_IN_FLIGHT
        self._booked_s = 0.0  # when the last step that was completed was booked
        self._awake_s = 0.0  # since when there was something to do
        self._timing = StepTiming(measured)
        self._prefill_time = PrefillTime(clock)
        self._learner = StepLearner(measured)
        self._telling_time = TellingTime()
        max_tokens = scheduler.config.max_batched_tokens
        self._pacer = Pacer(tpot_s, max_tokens, self._telling_time)
        self._short_steps = ShortSteps(max_tokens)
        self._beside_others = BesideOthers(tpot_s, self._telling_time)

    async def run(self) -> None:
        """Run steps until cancelled; sleeps when nothing can run.

        An error of a step ends that step's sequences. After several in a row (more where only
        memory was short), or one of the device, it ends with it, as with any of a listener: the
        process must go down.
        However it ends, it waits for the steps in flight, which use memory, or for ``abandon``.
        """
        self._loop = asyncio.get_running_loop()
        self._abandoned = self._loop.create_future()
        self._awake_s = self._clock()
        own_thread = None
        if self._model_thread is None:
            own_thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        try:
            await self._run_steps(
                ModelThread(self._model_thread or own_thread, self._runner, self._launcher)
            )
        finally:
            if own_thread is not None:
                own_thread.shutdown(wait=False)  # idle by now

    def subscribe(self, listener: StepListener) -> Callable[[], None]:
        """Call ``listener`` after each step, until told otherwise.

        Before another is decided, unless that was decided ahead.
        """
        ticket = object()
        self._listeners[ticket] = listener

        def unsubscribe() -> None:
            self._listeners.pop(ticket, None)

        return unsubscribe

    def add_prefill(self, seq: Sequence) -> None:
        """See the scheduler; so the next ones."""
        self._scheduler.add_prefill(seq)
        self._admitted(seq)
        self._awake.set()

    def reserve(self, seq: Sequence) -> None:
        self._scheduler.reserve(seq)
        self._admitted(seq)

    def mark_proven(self, seq: Sequence) -> None:
        self._scheduler.mark_proven(seq)
        self._awake.set()  # somebody may wait who shares its blocks from now on

    def start(self, seq: Sequence, emitted: list[int], compute_missing: bool) -> None:
        self._scheduler.start(seq, emitted, compute_missing)
        self._awake.set()

    def release(self, seq: Sequence) -> None:
        self._scheduler.release(seq)
        self._awake.set()  # somebody may wait for its blocks, or for nobody to wait for

    def generation(self, block_id: int) -> int:
        """See the pool; so the next ones."""
        return self._pool.generation(block_id)

    def quarantine(self, block_ids: Collection[int]) -> None:
        self._pool.quarantine(block_ids)

    def end_quarantine(self, block_ids: Collection[int]) -> None:
        self._pool.end_quarantine(block_ids)
        self._awake.set()

    def mismatch(self, quarantined: Collection[int]) -> str | None:
        return pool_mismatch(self._pool, self._scheduler, quarantined)

    @property
    def max_num_seqs(self) -> int:
        return self._scheduler.config.max_num_seqs

    @property
    def max_batched_tokens(self) -> int:
        return self._scheduler.config.max_batched_tokens

    def load(self) -> EngineLoad:
        scheduler = self._scheduler
        return EngineLoad(
            blocks=self._pool.counts(),
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_reserved=scheduler.num_reserved,
            num_preemptions=scheduler.num_preemptions,
            num_lookup_tokens=scheduler.num_lookup_tokens,
            num_hit_tokens=scheduler.num_hit_tokens,
            num_batch_preemptions=scheduler.num_batch_preemptions,
            num_set_aside=scheduler.num_set_aside,
            num_sat_out=scheduler.num_sat_out,
            work=scheduler.work,
            giving_way=scheduler.giving_way(),
        )

    def paced(self) -> list[Paced]:
        """Of this engine's pacer."""
        return self._pacer.paced(self._clock())

    def abandon(self) -> None:
        """The steps in flight will never end: a cancelled ``run`` does not wait for them.

        They may still write the KV pool, so nothing may be freed to anybody afterwards.
        """
        if self._abandoned is not None and not self._abandoned.done():
            self._abandoned.set_result(None)

    @property
    def step_due(self) -> bool:
        """Whether ``num_steps`` must advance: a step is in flight or about to be decided."""
        return bool(self._steps) or (self._awake.is_set() and self._scheduler.has_work)

    @property
    def predicted_step_s(self) -> float:
        """What the oldest step in flight (else the last) should take at most; 0 until known."""
        plan = self._steps[0].plan if self._steps else self._last_plan
        computed_s = forecast_s(work_of(plan), self._learner.model, self._timing)
        token_s = computed_s / max(1, plan.num_tokens)
        return computed_s + self._telling_time.expected_s(num_told(plan), token_s)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Moving average over steps that are mostly prefill; 0 until known."""
        return self._timing.prefill_tokens_per_s

    @property
    def decode_step_s(self) -> float:
        """Moving average of steps without prefill chunks; 0 until known."""
        return self._timing.decode_step_s

    @property
    def prefill_time_ratio(self) -> float:
        """Of its time of late, how much went into steps with prefill chunks."""
        return self._prefill_time.ratio

    @property
    def prefill_age_s(self) -> float | None:
        """See :class:`diptych.engine.protocol.Engine`."""
        if not self._scheduler.work.num_prefill_tokens:
            return None
        if not self._steps:
            return 0.0
        step, *behind = self._steps
        age_s = self._clock() - max(step.started_s, self._booked_s)
        work = work_of(step.plan)
        if work.num_prefill_tokens:
            return age_s
        if any(work_of(each.plan).num_prefill_tokens for each in behind):
            return 0.0  # what comes now is not in it
        return min(0.0, age_s - self._learner.model.decode.expected_s(work))

    @property
    def step_model(self) -> StepModel:
        """Learned from steps that were completed, from one's booking to the next one's.

        Once it is known not from those that took longer for what they told of prompts.
        """
        return self._learner.model

    @property
    def cache_log(self) -> CacheLog:
        """Of the pool."""
        return self._pool.cache_log

    def _admitted(self, seq: Sequence) -> None:
        self._short_steps.admitted(seq, self._clock())
        seq.preparation = self._prepare(seq.sampling)
        if not seq.is_prepared:
            assert seq.preparation is not None, "it is under way"
            seq.preparation.add_done_callback(self._wake)

    def _wake(self, prepared: Future[Any]) -> None:
        """Somebody may get a step now. From any thread."""
        if self._loop is not None:  # else the first step is still to be decided
            with suppress(RuntimeError):  # it is closed
                self._loop.call_soon_threadsafe(self._awake.set)

    async def _run_steps(self, thread: ModelThread) -> None:
        try:
            while True:
                self._awake.clear()
                if await self._begin(thread) and len(self._steps) < self._max_steps:
                    continue
                if not self._steps:
                    await self._awake.wait()
                    self._awake_s = self._clock()
                    continue
                updates = await self._end(thread)
                self.num_steps += 1
                for listener in tuple(self._listeners.values()):
                    listener(updates)
        finally:
            await self._drain(thread)

    async def _begin(self, thread: ModelThread) -> bool:
        """Decide a step and hand it over; False: there is none before the oldest has ended."""
        if self._steps and self._steps[-1].has_failed:
            return False  # nobody goes on from what was not computed
        now_s, scheduler, model = self._clock(), self._scheduler, self._learner.model
        prepared = (seq for seq in scheduler.runnable if seq.is_prepared)
        allowed = self._beside_others.allowed(prepared, model)
        work = scheduler.work if allowed is None else allowed.work
        plan = scheduler.schedule(
            self._max_prompt_tokens(work, model, now_s),
            max_yielding_tokens=self._short_steps.max_tokens(work, model, now_s),
            beside_others=allowed,
            prefill_cost=model.prefill if model.prefill.is_known else None,
            now_s=now_s,
        )
        if plan is None:
            return False
        self._beside_others.count_step(plan, scheduler.owners(plan), model)
        self._pacer.count_step()
        step = thread.begin(plan, self._clock())
        self._steps.append(step)
        if step.launched is not None:
            await asyncio.wait((step.launched,))
        return True

    async def _end(self, thread: ModelThread) -> list[SequenceUpdate]:
        """The oldest step: wait for it and book it."""
        step = self._steps[0]
        self._last_plan = step.plan
        try:
            output = await thread.end(step)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is of one step
            self._awake_s = self._clock()
            updates = self._fail(step.plan, error)
            self._steps.popleft()
            return updates
        self._steps.popleft()
        self._num_failed = self._num_out_of_memory = 0
        updates = self._scheduler.update(step.plan, output)
        self._record(step, output)
        return updates

    async def _drain(self, thread: ModelThread) -> None:
        """Wait for what is in flight, and free what was released; or for ``abandon``."""
        while self._steps:
            step = self._steps[0]
            try:
                output = await thread.end(step, self._abandoned)
            except GivenUpError:
                return
            except Exception as error:  # noqa: BLE001 - nobody is told any more
                self._scheduler.fail(step.plan, StepFailedError(f"a model step failed: {error}"))
            else:
                self._scheduler.update(step.plan, output)
            self._steps.popleft()

    def _max_prompt_tokens(self, work: StepWork, model: StepModel, now_s: float) -> int | None:
        begin_s = max(now_s, self._steps_end_s())
        decoding, runnable = self._scheduler.decoding, self._scheduler.runnable
        return self._pacer.max_prompt_tokens(decoding, runnable, work, model, begin_s)

    def _steps_end_s(self) -> float:
        """When the device should be done with all steps in flight; the last booking if none is."""
        if not self._steps:
            return self._booked_s
        begin_s = max(self._steps[0].started_s, self._booked_s)
        sizes = (step.plan.num_tokens for step in self._steps)
        return begin_s + sum(self._timing.predict_s(num_tokens) for num_tokens in sizes)

    def _fail(self, plan: StepPlan, error: Exception) -> list[SequenceUpdate]:
        if isinstance(error, DeviceMemoryError):
            self._num_out_of_memory += 1
        else:
            self._num_failed += 1
        if (
            isinstance(error, DeviceLostError)
            or self._num_failed >= MAX_FAILED_STEPS
            or self._num_out_of_memory >= MAX_STEPS_OUT_OF_MEMORY
        ):
            raise error
        error_id = uuid.uuid4().hex
        size = {"num_chunks": len(plan.chunks), "num_tokens": plan.num_tokens}
        logger.error("a step failed", exc_info=error, extra={"error_id": error_id, **size})
        self.last_step = None
        return self._scheduler.fail(plan, StepFailedError(f"a model step failed: {error_id}"))

    def _record(self, step: BegunStep, output: StepOutput) -> None:
        plan = step.plan
        num_decode = sum(len(chunk.token_ids) == 1 for chunk in plan.chunks)
        num_prefill = plan.num_tokens - num_decode
        # What lies between two steps, above all what listeners do, is of the second: so tokens
        # come as often as steps are said to take.
        since_s = max(self._awake_s, self._booked_s)
        self._booked_s = self._clock()
        overhead_s = max(0.0, self._booked_s - since_s - output.duration_s)
        self._timing.record(num_prefill, num_decode, output.duration_s)
        work = work_of(plan)
        model, took_s = self._learner.model, output.duration_s + overhead_s
        cost = model.cost_of(work)
        expected_s = cost.expected_s(work)
        if cost.is_known and tells_much(plan):  # by which others would be foretold
            token_s = expected_s / plan.num_tokens
            self._telling_time.add(num_told(plan), took_s - expected_s, token_s)
        else:
            self._learner.learn(work, took_s)
        if work.num_prefill_tokens:
            self._prefill_time.add(model.of_prompts_s(work, took_s))
        self.last_step = StepRecord(
            step.started_s,
            num_prefill,
            num_decode,
            output.duration_s,
            overhead_s,
            expected_s,
            expected_s * cost.upper_ratio,
        )
