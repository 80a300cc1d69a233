"""One worker's engine: the real scheduler, and a clock instead of a device. Pure.

A step takes what the step model expects of its work, times noise. Steps in which sequences do
nothing but decode are taken together, many at a time, as long as nobody calls in: scheduler, pool
and cache are told of their tokens at once, and of the last step as of any other. Where somebody
does call in, what ended before that moment is booked first.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

from diptych.engine.scheduling.audit import pool_mismatch
from diptych.engine.scheduling.beside_others import BesideOthers
from diptych.engine.scheduling.block_pool import BlockPool
from diptych.engine.scheduling.pacer import Pacer
from diptych.engine.scheduling.prefill_time import PrefillTime
from diptych.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from diptych.engine.scheduling.sequence import Sequence
from diptych.engine.scheduling.step import (
    Chunk,
    SampledToken,
    SequenceUpdate,
    StepOutput,
    StepPlan,
)
from diptych.engine.scheduling.step_learner import work_of
from diptych.engine.scheduling.step_timing import StepTiming, fade
from diptych.engine.scheduling.yielding import ShortSteps
from diptych.paced import Paced
from diptych.simulation.agenda import Agenda
from diptych.simulation.gaps import Gaps
from diptych.simulation.noise import Noise
from diptych.step_model import StepCost, StepModel, StepWork

_MOST_TOGETHER = 256  # steps
_LEFT_ALONE_S = 0.3  # for no longer: routers are told meanwhile, and that parts them

Listener = Callable[[SequenceUpdate], None]


class EngineLimits(NamedTuple):
    """What a worker's settings say of its engine.

    ``tpot_s``: promised to all that decode. ``local_prefill``: a decode worker may compute prompts
    itself.
    """

    max_num_seqs: int = 64
    max_batched_tokens: int = 512
    max_model_len: int = 4096
    num_blocks: int = 4096
    block_size: int = 16
    tpot_s: float | None = None
    local_prefill: bool = True


class _Step(NamedTuple):
    """The step in flight."""

    plan: StepPlan
    sequences: tuple[Sequence, ...]
    began_s: float
    took_s: float


class SimulatedEngine:
    """Owns one scheduler and one pool. Listeners hear of their sequence's update when a step
    ended that finished it, drew its first token here or computed a part of its prompt.
    """

    def __init__(
        self,
        limits: EngineLimits,
        model: StepModel,
        agenda: Agenda,
        noise: Noise,
        *,
        first_step: int = 0,
        on_load: Callable[[], None] = lambda: None,
        may_leap: bool = True,
    ) -> None:
        """``on_load`` is told that what a router may see is another; ``may_leap``: take steps
        together that are alike; ``first_step``: where in the noise its own begins.
        """
        self.model = model
        self._told_model, self._told_until_s = model, math.inf
        self.limits = limits
        self.gaps = Gaps()
        self.busy_s = 0.0
        self.num_steps = 0
        self.used_block_s = 0.0  # blocks that somebody holds, times s
        self.decode_step_s = 0.0  # moving average of steps without parts of prompts; 0: none yet
        self.pool = BlockPool(limits.num_blocks, limits.block_size)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=limits.max_num_seqs,
                max_batched_tokens=limits.max_batched_tokens,
                max_model_len=limits.max_model_len,
            ),
            self.pool,
        )
        self._agenda = agenda
        self._timing = StepTiming()
        self._prefill_time = PrefillTime(lambda: agenda.now_s)
        self._noise, self._first_step = noise, first_step
        self._on_load = on_load
        self._may_leap = may_leap
        self._listeners: dict[Sequence, Listener] = {}
        self._last_token_s: dict[Sequence, float] = {}
        self._step: _Step | None = None
        self._when_it_ends: list[Callable[[], None]] = []
        self._ends_s: list[float] = []  # of steps that are taken together; none: they are not
        self._num_turns = 0  # of the clock: only the newest counts
        self._looked_s = 0.0
        self._pacer = Pacer(limits.tpot_s, limits.max_batched_tokens)
        self._short_steps = ShortSteps(limits.max_batched_tokens)
        self._beside_others = BesideOthers(limits.tpot_s)

    def add_prefill(self, seq: Sequence, listener: Listener) -> None:
        """See the scheduler; so the next ones. Raises as it does."""
        self._settle()
        self.scheduler.add_prefill(seq)
        self._short_steps.admitted(seq, self._agenda.now_s)
        self._listeners[seq] = listener
        self._wake()

    def reserve(self, seq: Sequence, listener: Listener) -> None:
        self._settle()
        self.scheduler.reserve(seq)
        self._short_steps.admitted(seq, self._agenda.now_s)
        self._listeners[seq] = listener
        self._on_load()

    def mark_proven(self, seq: Sequence) -> None:
        self._settle()
        self.scheduler.mark_proven(seq)

    def start(self, seq: Sequence, emitted: list[int], first_token_s: float | None = None) -> None:
        """``first_token_s``: when the token came that was drawn elsewhere; None: none was."""
        self._settle()
        self.scheduler.start(seq, emitted, compute_missing=True)
        if first_token_s is not None:
            self._last_token_s[seq] = seq.emitted_s = first_token_s
        self._wake()

    def release(self, seq: Sequence) -> None:
        self._settle()
        self._forget(seq)
        self.scheduler.release(seq)
        self._wake()

    def after_step(self, happening: Callable[[], None]) -> None:
        """Once, when the step in flight has ended."""
        assert self._step is not None, "no step is in flight"
        self._when_it_ends.append(happening)

    @property
    def prefill_tokens_per_s(self) -> float:
        """As a worker measures it; 0 until known."""
        return self._timing.prefill_tokens_per_s

    @property
    def prefill_time_ratio(self) -> float:
        """Of its time of late, how much went into prompts."""
        return self._prefill_time.ratio

    @property
    def now_s(self) -> float:
        """By its clock."""
        return self._agenda.now_s

    @property
    def prefill_age_s(self) -> float | None:
        """As a worker says how long it has been at the prompts that it has."""
        if not self.scheduler.work.num_prefill_tokens:
            return None
        step = self._step
        if step is None:
            return 0.0
        age_s, work = self.now_s - step.began_s, work_of(step.plan)
        if work.num_prefill_tokens:
            return age_s
        return min(0.0, age_s - self.told_model.decode.expected_s(work))

    @property
    def is_stepping(self) -> bool:
        """Whether it computes anything now."""
        return self._step is not None or bool(self._ends_s)

    @property
    def num_listeners(self) -> int:
        """Sequences that somebody wants to hear of."""
        return len(self._listeners)

    def tell(self, model: StepModel, until_s: float) -> None:
        """Say until then that steps take what ``model`` says, whatever they take."""
        self._told_model, self._told_until_s = model, until_s

    @property
    def told_model(self) -> StepModel:
        """What a worker with this engine says that its steps take."""
        return self._told_model if self._agenda.now_s < self._told_until_s else self.model

    def paced(self) -> list[Paced]:
        """How far those are that decode and asked for a pace."""
        self._settle()
        return self._pacer.paced(self._agenda.now_s)

    def load(self) -> StepWork:
        """What is to be computed now."""
        self._settle()
        return self.scheduler.work

    def end_count(self) -> None:
        """Of its use: of a step in flight what is over by now, and what is held until now."""
        self._settle()
        self._look()
        if self._step is not None:
            self.busy_s -= self._step.began_s + self._step.took_s - self._agenda.now_s

    def mismatch(self) -> str | None:
        """What is wrong with the pool's books; None: nothing."""
        return pool_mismatch(self.pool, self.scheduler)

    def _wake(self) -> None:
        self._on_load()
        self._begin_if_idle()

    # Steps

    def _begin(self) -> None:
        """Decide the next step, or several; nothing if nobody wants one."""
        self._pacer.note(self.scheduler.decoding, self._agenda.now_s)
        num_together = self._num_together() if self._may_leap else 1
        if num_together > 1:
            self._begin_together(num_together)
            return
        now_s, scheduler, model = self._agenda.now_s, self.scheduler, self.model
        allowed = self._beside_others.allowed(scheduler.runnable, model)
        work = scheduler.work if allowed is None else allowed.work
        plan = scheduler.schedule(
            self._max_prompt_tokens(work),
            max_yielding_tokens=self._short_steps.max_tokens(work, model, now_s),
            beside_others=allowed,
            prefill_cost=model.prefill if model.prefill.is_known else None,
            now_s=now_s,
        )
        if plan is not None:
            self._beside_others.count_step(plan, scheduler.owners(plan), model)
            self._pacer.count_step()
            took_s = self._took_s(work_of(plan))
            self._go(plan, took_s, self._agenda.now_s + took_s)

    def _max_prompt_tokens(self, work: StepWork) -> int | None:
        scheduler, now_s = self.scheduler, self._agenda.now_s
        return self._pacer.max_prompt_tokens(
            scheduler.decoding, scheduler.runnable, work, self.model, now_s
        )

    def _go(self, plan: StepPlan, took_s: float, end_s: float) -> None:
        self.busy_s += took_s
        self._step = _Step(plan, self.scheduler.in_flight, end_s - took_s, took_s)
        self._due(end_s, self._end_step)

    def _due(self, at_s: float, happening: Callable[[], None]) -> None:
        self._num_turns += 1
        turn = self._num_turns

        def if_newest() -> None:
            if turn == self._num_turns:
                happening()

        self._agenda.at(at_s, if_newest)

    def _took_s(self, work: StepWork) -> float:
        cost = self.model.cost_of(work)
        only_decodes = not work.num_prefill_tokens
        return cost.expected_s(work) * self._factor(0, cost, only_decodes=only_decodes)

    def _factor(self, num_later: int, cost: StepCost, *, only_decodes: bool = True) -> float:
        """The noise of so many steps from now."""
        num_step = self._first_step + self.num_steps + num_later
        return self._noise.factor(num_step, cost.upper_ratio, only_decodes=only_decodes)

    def _end_step(self) -> None:
        step, self._step = self._step, None
        assert step is not None, "no step ends"
        work = work_of(step.plan)
        if work.num_prefill_tokens:
            self._prefill_time.add(self.model.of_prompts_s(work, step.took_s))
            self._timing.record(work.num_prefill_tokens, work.num_decode_rows, step.took_s)
            self._on_load()
        else:
            self.decode_step_s = fade(self.decode_step_s, step.took_s)
        self._look()
        self.num_steps += 1
        self._tell(self._update(step), self._agenda.now_s)
        happenings, self._when_it_ends = self._when_it_ends, []
        for happening in happenings:
            happening()
        self._begin_if_idle()

    def _begin_if_idle(self) -> None:
        """Unless a listener began one."""
        if self._step is None and not self._ends_s:
            self._begin()

    def _update(self, step: _Step) -> list[SequenceUpdate]:
        tokens = tuple(
            _token(seq, chunk) for seq, chunk in zip(step.sequences, step.plan.chunks, strict=True)
        )
        return self.scheduler.update(step.plan, StepOutput(tokens=tokens, duration_s=0.0))

    def _tell(self, updates: list[SequenceUpdate], now_s: float) -> None:
        """Count the gaps first: a listener may end sequences of this step."""
        told = []
        for update in updates:
            seq = update.sequence
            if update.token is not None:
                before_s = self._last_token_s.get(seq)
                self._last_token_s[seq] = now_s
                if before_s is not None:
                    self.gaps.add(now_s - before_s)
            is_first = update.token is not None and seq.num_output_tokens == _num_first(seq)
            if seq.prefill_only or is_first or update.finish_reason is not None:
                told.append(update)
        for update in told:
            seq = update.sequence
            listener = self._listeners.get(seq)
            if update.finish_reason is not None and not seq.prefill_only:
                self._forget(seq)
                self._on_load()
            if listener is not None:
                listener(update)

    def _forget(self, seq: Sequence) -> None:
        self._listeners.pop(seq, None)
        self._last_token_s.pop(seq, None)

    def _look(self) -> None:
        """Count what is held since the last look."""
        counts = self.pool.counts()
        used = counts.total - counts.free - counts.cached
        self.used_block_s += used * (self._agenda.now_s - self._looked_s)
        self._looked_s = self._agenda.now_s

    # Steps that are alike, taken together

    def _num_together(self) -> int:
        """How many steps come that only decode, and in which nobody ends before the last."""
        scheduler, pool = self.scheduler, self.pool
        decoding = scheduler.decoding
        if not decoding or scheduler.num_waiting or len(decoding) < scheduler.num_running:
            return 1
        if len({seq.gives_way for seq in decoding}) > 1 or self._beside_others.is_overdrawn:
            return 1  # some sit out, or each step pays for those before
        num = min(_MOST_TOGETHER, self.limits.max_batched_tokens // len(decoding))
        for seq in decoding:
            if seq.num_output_tokens < _num_first(seq):
                return 1  # its first token here is told of
            left = seq.sampling.max_tokens - seq.num_output_tokens
            num = min(num, left, self.limits.max_model_len - seq.num_tokens)
        wanted = sum(
            max(0, pool.num_blocks_for(seq.num_tokens + num - 1) - len(seq.block_table))
            for seq in decoding
        )
        return num if wanted <= pool.num_available_blocks else 1

    def _begin_together(self, num_steps: int) -> None:
        decoding = self.scheduler.decoding
        num_rows, cost = len(decoding), self.model.decode
        num_context = sum(seq.num_tokens for seq in decoding)
        at_s, ends = self._agenda.now_s, []
        for index in range(num_steps):
            work = StepWork(num_rows, num_context + index * num_rows)
            factor = self._factor(index, cost)
            at_s += cost.expected_s(work) * factor
            ends.append(at_s)
            if at_s > self._agenda.now_s + _LEFT_ALONE_S:
                break
        self._ends_s = ends
        self._due(at_s, self._end_together)

    def _end_together(self) -> None:
        ends, self._ends_s = self._ends_s, []
        self._take(ends)
        self._begin_if_idle()

    def _settle(self) -> None:
        """Book the steps that ended before now; the one in flight then goes on by itself."""
        ends, self._ends_s = self._ends_s, []
        if not ends:
            return
        num_ended = bisect_left(ends, self._agenda.now_s)
        if num_ended:
            self._take(ends[:num_ended])
        plan = self._decode_step()
        self._go(plan, self._took_s(work_of(plan)), ends[num_ended])

    def _take(self, ends: list[float]) -> None:
        """Book these steps as one: each sequence got a token at each of the moments."""
        decoding = self.scheduler.decoding
        began_s = ends[0] - self._took_s(self.scheduler.work)
        self.busy_s += ends[-1] - began_s
        for earlier_s, end_s in pairwise([began_s, *ends]):
            self.decode_step_s = fade(self.decode_step_s, end_s - earlier_s)
        self._look()
        self.num_steps += len(ends)
        for seq in decoding:
            self.scheduler.skip_steps(seq, [seq.key.sequence_id] * (len(ends) - 1))
            before_s = self._last_token_s.get(seq)
            if before_s is not None and len(ends) > 1:
                self.gaps.add(ends[0] - before_s)
            if len(ends) > 1:
                self._last_token_s[seq] = ends[-2]
        for earlier_s, end_s in pairwise(ends[:-1]):
            self.gaps.add(end_s - earlier_s, len(decoding))
        plan = self._decode_step()
        self._tell(self._update(_Step(plan, self.scheduler.in_flight, 0.0, 0.0)), ends[-1])

    def _decode_step(self) -> StepPlan:
        """One of those that are alike. Who owes nothing beforehand has saved what the last left."""
        plan = self.scheduler.schedule(now_s=self._agenda.now_s)
        assert plan is not None, "they all decode"
        self._beside_others.count_step(plan, self.scheduler.owners(plan), self.model)
        return plan


def _token(seq: Sequence, chunk: Chunk) -> SampledToken | None:
    """Every token of one request is its number: no two requests' answers share blocks."""
    return None if chunk.sample is None else SampledToken(seq.key.sequence_id, math.nan)


def _num_first(seq: Sequence) -> int:
    """How many tokens of its answer are there with the first that is drawn here."""
    return 2 if seq.to_pull else 1
