"""Which tokens run next, and whose blocks make room for them.

Owns every live :class:`~diptych.engine.scheduling.sequence.Sequence`. Knows neither the
model nor transfers nor time. Pure, synchronous and deterministic; called on the
event loop's thread only.

One step mixes single decode tokens and prefill chunks under a token budget.
Sequences that wait hold all blocks of their tokens or none, so nobody holds
blocks while waiting for more. When a running sequence cannot grow, the youngest
gives its blocks up and is recomputed later (never one whose blocks others read),
and newcomers are refused until it has them back.

Ideas: Orca (continuous batching), Sarathi (chunked prefill), vLLM (paging).
"""

import itertools
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from diptych.engine.scheduling.block_pool import BlockPool, Owner
from diptych.engine.scheduling.block_tables import BlockTables
from diptych.engine.scheduling.queues import Queues
from diptych.engine.scheduling.sequence import FinishReason, Sequence, SequenceState
from diptych.engine.scheduling.step import (
    Chunk,
    SampledToken,
    SampleSpec,
    SequenceUpdate,
    StepOutput,
    StepPlan,
)
from diptych.errors import (
    BlocksExhaustedError,
    ConfigurationError,
    InvalidRequestError,
    LogitsError,
)


class SchedulerConfig(BaseModel):
    """Limits of a step and of a sequence."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_num_seqs: int = Field(64, ge=1, description="Sequences in the batch.")
    max_batched_tokens: int = Field(
        512, ge=1, description="Tokens of one step; at least max_num_seqs."
    )
    decode_headroom_blocks: int = Field(
        1, ge=0, description="Blocks beyond its tokens that a sequence gets when admitted."
    )
    max_model_len: int = Field(ge=2, description="Longest sequence, prompt and output, tokens.")

    @model_validator(mode="after")
    def _check_step(self) -> Self:
        if self.max_batched_tokens < self.max_num_seqs:
            raise ValueError("max_batched_tokens must be at least max_num_seqs")
        return self


class SlotUsage(NamedTuple):
    """Slots of held blocks; a shared block counts for each of its sequences."""

    used: int  # hold KV
    allocated: int


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
        self.num_lookup_tokens = 0  # so far, tokens of admitted sequences
        self.num_hit_tokens = 0  # so far, of those found in the prefix cache
        self._tables = BlockTables(
            pool,
            headroom_blocks=config.decode_headroom_blocks,
            max_model_len=config.max_model_len,
        )
        self._queues = Queues()
        self._in_flight: StepPlan | None = None

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
    def num_pending_prefill_tokens(self) -> int:
        """Tokens to compute before their sequences can sample (single tokens not counted)."""
        runnable = itertools.chain(self._queues.running, self._queues.waiting)
        return sum(num for num in map(_num_pending, runnable) if num > 1)

    def holders(self) -> Iterator[tuple[Sequence, Owner]]:
        """Each sequence whose table holds blocks, and as what; for checks. O(sequences)."""
        for seq in self._queues:
            yield seq, _OWNER[seq.state]
        if self._in_flight is not None:
            for seq in self._in_flight.sequences:
                if seq.state is SequenceState.FINISHED:  # released during the step
                    yield seq, Owner.RUNNING

    def slot_usage(self) -> SlotUsage:
        """How full the held blocks are. O(sequences)."""
        used = allocated = 0
        for seq in self._queues:
            used += seq.num_computed_tokens
            allocated += len(seq.block_table) * self.pool.block_size
        return SlotUsage(used, allocated)

    def add_prefill(self, seq: Sequence) -> None:
        """Admit a ``prefill_only`` sequence: -> WAITING.

        Holds the prefix hit (``num_cached_tokens``) and fresh blocks for the rest; the
        block table does not change again until ``release``. The caller wakes the engine.
        Raises InvalidRequestError (never fits), BlocksExhaustedError (not now); nothing
        is then held.
        """
        assert seq.prefill_only, "others reserve and start"
        self._admit_new(seq, Owner.RUNNING, max_cached_tokens=seq.num_tokens - 1)
        self._queues.add_arrival(seq)

    def reserve(self, seq: Sequence) -> None:
        """Hold the prefix hit, blocks for the rest, and headroom: -> RESERVED.

        ``block_table[num_cached_tokens // block_size :]`` is where missing KV goes.
        Raises as ``add_prefill``.
        """
        assert not seq.prefill_only, "only sequences that decode are reserved"
        self._admit_new(seq, Owner.RESERVED, max_cached_tokens=seq.num_tokens)
        self._queues.add_reserved(seq)

    def mark_proven(self, seq: Sequence) -> None:
        """The KV of all of a RESERVED sequence's tokens is in its blocks and proven."""
        assert seq in self._queues.held, "proven, but not reserved here"
        assert seq.state is SequenceState.RESERVED, f"proven while {seq.state.name}"
        self._tables.enter_computed(seq, seq.num_computed_tokens, seq.num_tokens)
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
        seq.token_ids += emitted
        self.pool.retag(seq.block_table, Owner.RESERVED, Owner.RUNNING)
        self._queues.add_arrival(seq)
        if seq.num_computed_tokens == num_tokens:
            self._tables.step_back(seq, Owner.RUNNING)
        try:
            self._tables.grow(seq, Owner.RUNNING)
        except BlocksExhaustedError:
            self._preempt(seq)  # it is the youngest

    def release(self, seq: Sequence, unfinished_block_ids: Collection[int] = ()) -> None:
        """End a sequence in any state, even one that was refused: -> FINISHED. Idempotent.

        Its blocks go when the step in flight, if it takes part, is booked. Those in
        ``unfinished_block_ids`` are quarantined until ``pool.end_quarantine``. The
        caller wakes the engine: somebody may wait for the blocks.
        """
        if seq.state is SequenceState.FINISHED:
            return
        self.pool.quarantine(unfinished_block_ids)
        owner = _OWNER[seq.state]
        self._queues.finish(seq)
        if self._in_flight is None or seq not in self._in_flight.sequences:
            self._tables.drop(seq, owner)

    def schedule(self) -> StepPlan | None:
        """Decide the next step; None if nothing can run until somebody calls in.

        Each plan is followed by ``update`` before the next ``schedule``.
        """
        assert self._in_flight is None, "a step is in flight"
        self._grow_running()
        # Single tokens first: a long prompt may slow decoding down but not stop it.
        sequences = [seq for seq in self._queues.running if _num_pending(seq) == 1]
        chunks = [self._chunk(seq, 1) for seq in sequences]
        budget = self.config.max_batched_tokens - len(chunks)
        prefilling = [seq for seq in self._queues.running if _num_pending(seq) > 1]
        candidates = itertools.chain(prefilling, self._admissions())
        while budget and (seq := next(candidates, None)) is not None:
            chunks.append(self._chunk(seq, budget))
            sequences.append(seq)
            budget -= len(chunks[-1].token_ids)
        if not chunks:
            return None
        self._in_flight = StepPlan(chunks=tuple(chunks), sequences=tuple(sequences))
        return self._in_flight

    def update(self, plan: StepPlan, output: StepOutput) -> list[SequenceUpdate]:
        """Book a completed step; one entry per sequence not released meanwhile.

        Sequences that finished are FINISHED with their blocks freed; ``prefill_only``
        ones are LEASED with their blocks held, finished or not.
        """
        assert plan is self._in_flight, "another step is in flight"
        self._in_flight = None
        updates = []
        for seq, chunk, token in zip(plan.sequences, plan.chunks, output.tokens, strict=True):
            seq.num_computed_tokens = chunk.end
            self._tables.enter_computed(seq, chunk.start, chunk.end)
            if seq.state is SequenceState.FINISHED:  # released meanwhile
                self._tables.drop(seq, Owner.RUNNING)
            else:
                updates.append(self._book(seq, chunk, token))
        return updates

    def _book(
        self, seq: Sequence, chunk: Chunk, token: SampledToken | LogitsError | None
    ) -> SequenceUpdate:
        num_step_tokens = len(chunk.token_ids)
        if chunk.sample is None:
            return SequenceUpdate(seq, chunk.end, num_step_tokens, None, None, None)
        assert token is not None, "the runner owes a token"
        error = token if isinstance(token, LogitsError) else None
        reason = None
        if isinstance(token, SampledToken):
            seq.token_ids.append(token.token_id)
            reason = self._finish_reason(seq, chunk.sample, token.token_id)
        if seq.prefill_only:
            self._queues.lease(seq)
            self.pool.retag(seq.block_table, Owner.RUNNING, Owner.LEASED)
        elif reason is not None or error is not None:
            self._queues.finish(seq)
            self._tables.drop(seq, Owner.RUNNING)
        if isinstance(token, LogitsError):
            return SequenceUpdate(seq, chunk.end, num_step_tokens, None, None, None, token)
        return SequenceUpdate(seq, chunk.end, num_step_tokens, token, chunk.end, reason)

    def _finish_reason(
        self, seq: Sequence, sample: SampleSpec, token_id: int
    ) -> FinishReason | None:
        if sample.allow_stop and token_id in seq.sampling.stop_token_ids:
            return FinishReason.STOP
        if seq.num_output_tokens >= seq.sampling.max_tokens:
            return FinishReason.LENGTH
        if seq.num_tokens >= self.config.max_model_len:
            return FinishReason.LENGTH
        return None

    def _admit_new(self, seq: Sequence, owner: Owner, *, max_cached_tokens: int) -> None:
        if not 0 < seq.num_tokens < self.config.max_model_len:
            raise InvalidRequestError(
                f"{seq.num_tokens} is not within 1 and {self.config.max_model_len - 1}",
                field="token_ids",
            )
        # What preempted sequences wait for is not given to newcomers.
        preempted = (each for each in self._queues.waiting if not each.block_table)
        owed = sum(map(self._tables.num_wanted_blocks, preempted))
        seq.num_cached_tokens = self._tables.admit(
            seq, owner, max_cached_tokens=max_cached_tokens, keep=owed
        )
        self.num_lookup_tokens += seq.num_tokens
        self.num_hit_tokens += seq.num_cached_tokens

    def _grow_running(self) -> None:
        """Give each running sequence the blocks of its tokens, the oldest first."""
        for seq in tuple(self._queues.running):
            while seq.state is SequenceState.RUNNING:
                try:
                    self._tables.grow(seq, Owner.RUNNING)
                    break
                except BlocksExhaustedError:
                    self._preempt(self._queues.youngest_preemptible())

    def _preempt(self, seq: Sequence) -> None:
        """Take a sequence's blocks; it computes its tokens again when it gets others."""
        if seq.state is SequenceState.RUNNING:
            self._queues.wait_again(seq)
        self._tables.drop(seq, Owner.RUNNING)
        seq.num_preemptions += 1
        self.num_preemptions += 1

    def _admissions(self) -> Iterable[Sequence]:
        """Move waiting sequences into the batch, one by one, as long as there is room.

        First come, first served among those that lack blocks; those that have theirs
        do not wait behind them.
        """
        may_admit = True
        for seq in tuple(self._queues.waiting):
            if len(self._queues.running) >= self.config.max_num_seqs:
                return
            if not seq.block_table:
                may_admit = may_admit and self._admit_again(seq)
                if not may_admit:
                    continue
            elif not seq.prefill_only:
                self._tables.refresh(seq, Owner.RUNNING)
            self._queues.run(seq)
            yield seq

    def _admit_again(self, seq: Sequence) -> bool:
        try:
            self._tables.admit(seq, Owner.RUNNING, max_cached_tokens=seq.num_tokens - 1)
        except BlocksExhaustedError:
            return False
        return True

    def _chunk(self, seq: Sequence, budget: int) -> Chunk:
        start, num_tokens = seq.num_computed_tokens, seq.num_tokens
        end = min(num_tokens, start + budget)
        sample = None
        if end == num_tokens:
            params = seq.sampling
            sample = SampleSpec(
                params=params, allow_stop=seq.num_output_tokens >= params.min_tokens
            )
        else:  # readers are offered whole blocks
            aligned = end - end % self.pool.block_size
            end = aligned if aligned > start else end
        return Chunk(
            token_ids=tuple(seq.token_ids[start:end]),
            start=start,
            block_table=self._tables.snapshot(seq),
            sample=sample,
        )


def _num_pending(seq: Sequence) -> int:
    """Tokens without KV."""
    return len(seq.token_ids) - seq.num_computed_tokens
