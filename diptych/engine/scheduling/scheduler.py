"""Which tokens run next, and whose blocks make room for them.

Owns every live :class:`~diptych.engine.scheduling.sequence.Sequence`. Knows neither the
model nor transfers nor time. Pure, synchronous and deterministic; called on the
event loop's thread only.

One step mixes single decode tokens and prefill chunks under a token budget.
Sequences that wait hold all blocks of their tokens or none, so nobody holds
blocks while waiting for more. When a running sequence cannot grow, the youngest
gives its blocks up and is recomputed later (never one whose blocks others read),
and newcomers are refused until it has them back. A sequence whose next block
another one's chunk completes waits for the next step instead of computing it as well.

Sequences that give way (:mod:`diptych.engine.scheduling.yielding`) leave for those that do not
(:mod:`diptych.engine.scheduling.making_way`), and are the first to be preempted.

A step may be planned *ahead*, while the one before it is in flight and its tokens are not known:
then a sequence goes on from a token that the device alone knows, and one that turns out to have
ended has computed in vain. Blocks stay whoever's they are until the last step that was given them
has been booked. What needs to know more is left until it is known: nothing is planned ahead while
somebody waits for a token (:mod:`diptych.engine.scheduling.run_ahead`) or for others' blocks.

Ideas: Orca (continuous batching), Sarathi (chunked prefill), vLLM (paging).
"""

import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Final, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from diptych.engine.scheduling import backlog
from diptych.engine.scheduling.admission import Admission
from diptych.engine.scheduling.beside_others import Allowed
from diptych.engine.scheduling.block_pool import BlockPool, Owner
from diptych.engine.scheduling.block_tables import BlockTables
from diptych.engine.scheduling.chunks import next_chunk
from diptych.engine.scheduling.making_way import MakingWay
from diptych.engine.scheduling.prefill_shares import PrefillShares
from diptych.engine.scheduling.queues import GivingWay, Queues
from diptych.engine.scheduling.rows import Rows
from diptych.engine.scheduling.run_ahead import ends_with_next, waits_for_token
from diptych.engine.scheduling.sequence import Sequence, SequenceState
from diptych.engine.scheduling.step import (
    SequenceUpdate,
    StepOutput,
    StepPlan,
    check_step_limits,
)
from diptych.engine.scheduling.step_results import StepResults
from diptych.engine.scheduling.turns import Turns
from diptych.engine.scheduling.yielding import note_passed
from diptych.errors import (
    BlocksComingError,
    BlocksExhaustedError,
    ConfigurationError,
    DiptychError,
    InvalidRequestError,
)
from diptych.step_model import StepCost, StepWork


class SchedulerConfig(BaseModel):
    """Limits of a step and of a sequence."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_num_seqs: int = Field(ge=1, description="Sequences in the batch.")
    max_batched_tokens: int = Field(ge=1, description="Tokens of one step; at least max_num_seqs.")
    decode_headroom_blocks: int = Field(
        1, ge=0, description="Blocks beyond its tokens that a sequence gets when admitted."
    )
    max_model_len: int = Field(ge=2, description="Longest sequence, prompt and output, tokens.")

    @model_validator(mode="after")
    def _check_step(self) -> Self:
        check_step_limits(
            max_batched_tokens=self.max_batched_tokens, max_num_seqs=self.max_num_seqs
        )
        return self


MAX_STEPS_IN_FLIGHT: Final = 2  # a chunk may follow one of the step before, and no other


class _StepInFlight(NamedTuple):
    """A plan that is being executed, and the owners of its chunks."""

    plan: StepPlan
    sequences: tuple[Sequence, ...]


_OWNER = {
    SequenceState.RESERVED: Owner.RESERVED,
    SequenceState.WAITING: Owner.RUNNING,
    SequenceState.RUNNING: Owner.RUNNING,
    SequenceState.LEASED: Owner.LEASED,
}


class Scheduler:
    """Sequences, their states and their blocks. Invariants: see the module."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        """Raises ConfigurationError if the pool cannot hold the longest sequence."""
        needed = pool.num_blocks_for(config.max_model_len - 1)
        if needed > pool.num_blocks:
            raise ConfigurationError(
                f"max_model_len: {config.max_model_len} tokens need {needed} KV blocks, "
                f"the pool has {pool.num_blocks}"
            )
        self.config = config
        self.pool = pool
        self.num_preemptions = 0  # so far, all sequences
        self.num_batch_preemptions = 0  # of those, of sequences that yield
        self.num_sat_out = 0  # so far, steps of others that one in the batch that decodes sat out
        self._tables = BlockTables(
            pool,
            headroom_blocks=config.decode_headroom_blocks,
            max_model_len=config.max_model_len,
        )
        self._queues = Queues()
        self._turns = Turns(config.max_batched_tokens)
        self._admission = Admission(
            self._queues,
            self._tables,
            self._turns,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
        )
        self._results = StepResults(
            self._queues, self._tables, pool, max_model_len=config.max_model_len
        )
        self._making_way = MakingWay(
            self._queues,
            self._tables,
            pool,
            max_num_seqs=config.max_num_seqs,
            preempt=self._preempt,
        )
        self._in_flight: deque[_StepInFlight] = deque()  # the oldest first

    @property
    def has_work(self) -> bool:
        """Whether a sequence runs or waits. ``schedule`` may still find no blocks for it."""
        return bool(self._queues.running or self._queues.waiting)

    @property
    def num_running(self) -> int:
        """Sequences in the batch."""
        return len(self._queues.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that want a place in the batch (reserved ones do not)."""
        return len(self._queues.waiting)

    @property
    def num_reserved(self) -> int:
        """Sequences that will want a place in the batch. O(those and leased ones)."""
        return self._queues.count_reserved()

    def giving_way(self) -> GivingWay:
        """Sequences that leave their place or their blocks for others."""
        return self._queues.count_giving_way()

    @property
    def num_lookup_tokens(self) -> int:
        """Tokens of admitted sequences, so far."""
        return self._admission.num_lookup_tokens

    @property
    def num_hit_tokens(self) -> int:
        """Of those, found in the prefix cache."""
        return self._admission.num_hit_tokens

    @property
    def num_set_aside(self) -> int:
        """Times that a sequence sat out for others, with its blocks, so far."""
        return self._making_way.num_set_aside

    @property
    def runnable(self) -> Iterator[Sequence]:
        """Those in the batch, and those that want to be."""
        return self._queues.runnable

    @property
    def work(self) -> StepWork:
        """To be computed: one token of each sequence that decodes, and what prompts lack."""
        return backlog.work(self._queues.runnable)

    @property
    def in_flight(self) -> tuple[Sequence, ...]:
        """The owners of the chunks of the steps in flight, in order; for checks."""
        return tuple(itertools.chain.from_iterable(step.sequences for step in self._in_flight))

    def holders(self) -> Iterator[tuple[Sequence, Owner]]:
        """Each sequence whose table holds blocks, and as what; for checks. O(sequences)."""
        for seq in self._queues:
            yield seq, _OWNER[seq.state]
        for seq in dict.fromkeys(self.in_flight):
            if seq.state is SequenceState.FINISHED:  # during a step
                yield seq, Owner.RUNNING

    def add_prefill(self, seq: Sequence) -> None:
        """Admit a ``prefill_only`` sequence: -> WAITING.

        Holds the prefix hit (``num_cached_tokens``) and fresh blocks for the rest. Those are
        swapped for what others have computed when the sequence gets its turn; from its first
        step on the block table does not change until ``release``. The caller wakes the engine.
        Raises InvalidRequestError (never fits), BlocksExhaustedError (not now), and
        BlocksComingError: those that give way to it are at work, and leave with the end of their
        step. Nothing is then held.
        """
        assert seq.prefill_only, "others reserve and start"
        self._admit(seq, Owner.RUNNING, max_cached_tokens=seq.num_shareable_tokens)
        self._queues.add_arrival(seq)

    def reserve(self, seq: Sequence) -> None:
        """Hold the prefix hit, blocks for the rest, and headroom: -> RESERVED.

        ``block_table[num_cached_tokens // block_size :]`` is where missing KV goes. If the
        sequence is ``to_pull``, the hit may be longer than what could be computed from.
        Raises as ``add_prefill``.
        """
        assert not seq.prefill_only, "only sequences that decode are reserved"
        self._admit(seq, Owner.RESERVED, max_cached_tokens=seq.num_tokens)
        self._queues.add_reserved(seq)

    def _admit(self, seq: Sequence, owner: Owner, *, max_cached_tokens: int) -> None:
        admit = partial(
            self._admission.admit_new,
            seq,
            owner,
            max_cached_tokens=max_cached_tokens,
            to_pull=seq.to_pull,
        )
        try:
            admit()
        except BlocksExhaustedError as error:
            num_blocks = self._admission.num_needed_blocks(seq)
            if seq.gives_way or not self._making_way.make_room(num_blocks):
                raise
            if self._making_way.is_under_way:
                raise BlocksComingError(str(error), retry_after_s=error.retry_after_s) from error
            admit()

    def mark_proven(self, seq: Sequence) -> None:
        """What a RESERVED sequence needs of the KV of all of its tokens is there and proven."""
        assert seq in self._queues.held, "proven, but not reserved here"
        assert seq.state is SequenceState.RESERVED, f"proven while {seq.state.name}"
        self._tables.enter_pulled(seq)
        seq.num_computed_tokens = seq.num_tokens

    def start(self, seq: Sequence, emitted: list[int], compute_missing: bool) -> None:
        """Append ``emitted`` and let a RESERVED sequence run: -> WAITING.

        Raises InvalidRequestError, having changed nothing: not proven and not
        ``compute_missing``, not RESERVED, or nothing left to produce. No block of it may be
        quarantined: reserve anew instead. The caller wakes the engine.
        """
        if seq not in self._queues.held or seq.state is not SequenceState.RESERVED:
            raise InvalidRequestError(f"the sequence is {seq.state.name}", field="sequence_id")
        if seq.num_computed_tokens < seq.num_tokens and not compute_missing:
            raise InvalidRequestError("the KV is not proven", field="compute_missing")
        num_tokens, num_output = seq.num_tokens + len(emitted), seq.num_output_tokens + len(emitted)
        if num_tokens >= self.config.max_model_len or num_output >= seq.sampling.max_tokens:
            raise InvalidRequestError("leave nothing to produce", field="emitted_token_ids")
        first_missing = seq.num_computed_tokens // self.pool.block_size
        assert seq.num_computed_tokens == seq.num_tokens or all(
            map(self.pool.is_writable, seq.block_table[first_missing:])
        ), "a posted read may still write what is to be computed"
        was_hit_to_pull = seq.to_pull and seq.num_computed_tokens < seq.num_tokens
        seq.token_ids += emitted
        self.pool.retag(seq.block_table, Owner.RESERVED, Owner.RUNNING)
        self._queues.add_arrival(seq)
        if was_hit_to_pull and self.pool.needs.reaches:  # what comes next may see its holes
            self._tables.drop(seq, Owner.RUNNING)
            self._admission.admit_again(seq)  # or it waits for blocks, like one that was preempted
            return
        if seq.num_computed_tokens == num_tokens:
            self._tables.step_back(seq, Owner.RUNNING)
        try:
            self._tables.grow(seq, Owner.RUNNING)
        except BlocksExhaustedError:
            self._preempt(seq)  # it is the youngest

    def release(self, seq: Sequence) -> None:
        """End a sequence in any state, even one that was refused: -> FINISHED. Idempotent.

        Its blocks go when the last step in flight in which it takes part is booked; those that
        are in quarantine stay there. The caller wakes the engine: somebody may wait for the blocks.
        """
        if seq.state is SequenceState.FINISHED:
            return
        owner = _OWNER[seq.state]
        self._queues.finish(seq)
        if not seq.num_in_flight_tokens:
            self._tables.drop(seq, owner)
        elif owner is not Owner.RUNNING:  # as it will be dropped
            self.pool.retag(seq.block_table, owner, Owner.RUNNING)

    @property
    def decoding(self) -> list[Sequence]:
        """Sequences of the batch that get one token with the next step that is planned."""
        running, longest = self._queues.running, self.config.max_model_len
        return [seq for seq in running if seq.decodes_next and not ends_with_next(seq, longest)]

    def schedule(
        self,
        max_prompt_tokens: int | None = None,
        *,
        max_yielding_tokens: int | None = None,
        beside_others: Allowed | None = None,
        prefill_cost: StepCost | None = None,
        now_s: float = 0.0,
    ) -> StepPlan | None:
        """Decide the next step; None if nothing can run until somebody calls in.

        ``max_prompt_tokens``: no more than that of prompts, if anybody decodes.
        ``max_yielding_tokens``: no more than that of prompts that give way. ``beside_others``:
        what these have of it if others decode; one that gets into the batch with it has its token
        all the same. ``prefill_cost`` is of steps with prompts, where it is known. ``now_s`` never
        goes back; by it those age that yield.

        Steps end in order, each by ``update`` or ``fail``. One may be in flight: what is decided
        then is a step ahead, and None if there is none before that one has ended.
        """
        assert len(self._in_flight) < MAX_STEPS_IN_FLIGHT, "steps are in flight"
        running = self._grow_ahead() if self._in_flight else self._grow_running()
        if running is None:
            return None
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for seq in running:
            (decoding if seq.decodes_next else prefilling).append(seq)
        decoding += self._admission.decoding_next()
        # Single tokens first: a long prompt may slow decoding down but not stop it.
        rows = Rows(decoding, self._making_way.set_aside, beside_others)
        bounds = (max_yielding_tokens, rows.max_prompt_tokens)
        shares = PrefillShares(
            self.config.max_batched_tokens - rows.num_tokens,
            block_size=self.pool.block_size,
            max_step_tokens=self.config.max_batched_tokens,
            max_prompt_tokens=max_prompt_tokens if rows.ends else None,
            max_yielding_tokens=min((each for each in bounds if each is not None), default=None),
            cost=None if rows.ends else prefill_cost,
            num_waiting=len(prefilling) + self.num_waiting,
        )
        for seq in self._admission.in_turn(prefilling, shares, self._known_ends_in_flight()):
            if not rows.sits_out(seq):
                shares.take(seq)
        shares.share_out_rest()
        for seq, end in shares.ends.items():
            self._turns.give(seq, end - seq.num_planned_computed_tokens)
        self._making_way.count_set_aside()
        rows.fill_up(shares)
        if not rows.ends:
            return None
        self.num_sat_out += rows.num_sat_out
        note_passed(self._queues.runnable, rows.ends, now_s)
        return self._plan(rows.ends)

    def _plan(self, ends: Mapping[Sequence, int]) -> StepPlan:
        """Up to where each computes; in flight from here on."""
        drawn_by: dict[Sequence, int] = {}
        if self._in_flight:
            drawn_by = {seq: at for at, seq in enumerate(self._in_flight[-1].sequences)}
        plan = StepPlan(
            chunks=tuple(next_chunk(seq, end, self._tables, drawn_by) for seq, end in ends.items())
        )
        self._in_flight.append(_StepInFlight(plan, tuple(ends)))
        return plan

    def owners(self, plan: StepPlan) -> tuple[Sequence, ...]:
        """Of the chunks of a plan in flight, in order; for checks."""
        return next(step.sequences for step in self._in_flight if step.plan is plan)

    def update(self, plan: StepPlan, output: StepOutput) -> list[SequenceUpdate]:
        """Book the oldest step in flight, completed; one entry per sequence not ended meanwhile.

        Sequences that finished are FINISHED with their blocks freed; ``prefill_only``
        ones are LEASED with their blocks held, finished or not. Of a sequence whose logits
        are not numbers nothing is shared, neither what this step computed nor what it hit.
        """
        at_work = self.in_flight
        updates = self._results.book(self._end_step(plan), plan, output, at_work)
        self._making_way.let_leave()
        return updates

    def fail(self, plan: StepPlan, error: DiptychError) -> list[SequenceUpdate]:
        """Book a step that was not completed: all its sequences end with ``error``.

        As ``update``; nothing of what it may have written is used.
        """
        updates = self._results.fail(self._end_step(plan), plan, error)
        self._making_way.let_leave()
        return updates

    def skip_steps(self, seq: Sequence, token_ids: list[int]) -> None:
        """As if so many steps had drawn these for one that decodes; no step is in flight.

        For who simulates many at once. Raises BlocksExhaustedError.
        """
        seq.token_ids += token_ids
        self._tables.grow(seq, Owner.RUNNING)
        end = seq.num_tokens - 1
        self._tables.enter_computed(seq, seq.num_computed_tokens, end)
        seq.num_computed_tokens = end

    def _end_step(self, plan: StepPlan) -> tuple[Sequence, ...]:
        assert self._in_flight, "no step is in flight"
        step = self._in_flight.popleft()
        assert plan is step.plan, "another step is the oldest in flight"
        return step.sequences

    def _known_ends_in_flight(self) -> dict[Sequence, int]:
        """Up to where the steps in flight compute tokens that are known."""
        return {
            seq: chunk.end
            for step in self._in_flight
            for seq, chunk in zip(step.sequences, step.plan.chunks, strict=True)
            if chunk.follows is None and seq.state is SequenceState.RUNNING
        }

    def _grow_running(self) -> list[Sequence]:
        """Give each running sequence the blocks of its tokens, the oldest first.

        Then those that give way leave for those that wait.
        """
        for seq in tuple(self._queues.running):
            while seq.state is SequenceState.RUNNING:
                try:
                    self._tables.grow(seq, Owner.RUNNING)
                    break
                except BlocksExhaustedError:
                    self._preempt(self._queues.first_to_leave())
        self._making_way.make_way()
        return self._queues.running.copy()

    def _grow_ahead(self) -> list[Sequence] | None:
        """The same for a step ahead; who ends in the step before has none.

        None: it is no time to plan ahead. Whoever would have to give blocks up may be at work on
        them; and who had to wait for a token while the others go on, would get one with every
        other step.
        """
        if self._making_way.is_under_way or self._making_way.is_wanted:
            return None
        ahead = []
        for seq in self._queues.running:
            if ends_with_next(seq, self.config.max_model_len):
                continue
            if waits_for_token(seq):
                return None
            try:
                self._tables.grow(seq, Owner.RUNNING)
            except BlocksExhaustedError:
                return None
            ahead.append(seq)
        return ahead

    def _preempt(self, seq: Sequence) -> None:
        """Take a sequence's blocks; it computes its tokens again when it gets others."""
        if seq.state is SequenceState.RUNNING:
            self._queues.wait_again(seq)
        self._tables.drop(seq, Owner.RUNNING)
        seq.num_preemptions += 1
        self.num_preemptions += 1
        if seq.yields:
            self.num_batch_preemptions += 1
