"""What a step that has ended did to its sequences: computed, drew a token, ended them. Pure."""

import itertools
from collections.abc import Collection

from diptych.engine.scheduling.block_pool import BlockPool, Owner
from diptych.engine.scheduling.block_tables import BlockTables
from diptych.engine.scheduling.queues import Queues
from diptych.engine.scheduling.sequence import Sequence, SequenceState
from diptych.engine.scheduling.step import (
    Chunk,
    SampledToken,
    SampleSpec,
    SequenceUpdate,
    StepOutput,
    StepPlan,
)
from diptych.errors import DiptychError, LogitsError
from diptych.finish_reason import FinishReason


class StepResults:
    """Books steps in one scheduler's queues and tables. ``sequences`` own a plan's chunks."""

    def __init__(
        self, queues: Queues, tables: BlockTables, pool: BlockPool, *, max_model_len: int
    ) -> None:
        self._queues = queues
        self._tables = tables
        self._pool = pool
        self._max_model_len = max_model_len

    def book(
        self,
        sequences: tuple[Sequence, ...],
        plan: StepPlan,
        output: StepOutput,
        at_work: Collection[Sequence],
    ) -> list[SequenceUpdate]:
        """A completed step, see ``Scheduler.update``. at_work: in it, or in one after it."""
        steps = list(zip(sequences, plan.chunks, output.tokens, strict=True))
        for seq, chunk, token in steps:  # before anything is entered
            if isinstance(token, LogitsError) and _is_of_use(seq, chunk):
                self._distrust(seq, at_work)
        updates = []
        for index, (seq, chunk, token) in enumerate(steps):
            is_of_use = seq.state is SequenceState.RUNNING or _is_of_use(seq, chunk)
            end = _land(seq, chunk)
            if is_of_use:
                seq.num_computed_tokens = end
                self._tables.enter_computed(seq, chunk.start, end)
            if seq.state is SequenceState.RUNNING:
                update = self._book(seq, chunk, token)
                updates.append(update._replace(report=output.reports.get(index)))
            elif seq.state is SequenceState.FINISHED:
                self._drop_if_landed(seq)
        return updates

    def fail(
        self, sequences: tuple[Sequence, ...], plan: StepPlan, error: DiptychError
    ) -> list[SequenceUpdate]:
        """One that was not completed, see ``Scheduler.fail``."""
        updates = []
        for seq, chunk in zip(sequences, plan.chunks, strict=True):
            _land(seq, chunk)
            if seq.state is SequenceState.RUNNING:
                num_computed = seq.num_computed_tokens
                self._leave_batch(seq)
                updates.append(SequenceUpdate(seq, num_computed, 0, None, None, None, error))
            elif seq.state is SequenceState.FINISHED:
                self._drop_if_landed(seq)
        return updates

    def _distrust(self, seq: Sequence, at_work: Collection[Sequence]) -> None:
        """Keep all KV that led to a step without numbers from those who do not have it yet.

        Whoever has some of it may go on, and likely ends the same way; nobody shares with it.
        """
        spoilt = self._tables.distrust(seq)
        for other in itertools.chain(self._queues, at_work):
            if not spoilt.isdisjoint(other.block_table):
                other.is_private = True

    def _book(
        self, seq: Sequence, chunk: Chunk, token: SampledToken | DiptychError | None
    ) -> SequenceUpdate:
        num_step_tokens = len(chunk.token_ids)
        if isinstance(token, DiptychError):
            self._leave_batch(seq)
            return SequenceUpdate(seq, chunk.end, num_step_tokens, None, None, None, token)
        if chunk.sample is None:
            return SequenceUpdate(seq, chunk.end, num_step_tokens, None, None, None)
        assert token is not None, "the runner owes a token"
        seq.token_ids.append(token.token_id)
        reason = self._finish_reason(seq, chunk.sample, token.token_id)
        if seq.prefill_only or reason is not None:
            self._leave_batch(seq)
        return SequenceUpdate(seq, chunk.end, num_step_tokens, token, chunk.end, reason)

    def _leave_batch(self, seq: Sequence) -> None:
        """It has no further steps: RUNNING -> LEASED with its blocks, or FINISHED."""
        if seq.prefill_only:
            self._queues.lease(seq)
            self._pool.retag(seq.block_table, Owner.RUNNING, Owner.LEASED)
        else:
            self._queues.finish(seq)
            self._drop_if_landed(seq)

    def _drop_if_landed(self, seq: Sequence) -> None:
        """Blocks go with the last step that may write or read them."""
        if not seq.num_in_flight_tokens:
            self._tables.drop(seq, Owner.RUNNING)

    def _finish_reason(
        self, seq: Sequence, sample: SampleSpec, token_id: int
    ) -> FinishReason | None:
        # Before min_tokens a constraint's row draws one only where nothing else fits.
        may_stop = sample.allow_stop or seq.sampling.constraint is not None
        if may_stop and token_id in seq.sampling.stop_token_ids:
            return FinishReason.STOP
        if seq.num_output_tokens >= seq.sampling.max_tokens:
            return FinishReason.LENGTH
        if seq.num_tokens >= self._max_model_len:
            return FinishReason.LENGTH
        return None


def _land(seq: Sequence, chunk: Chunk) -> int:
    """The chunk is not in flight any more. Returns where it ends."""
    end = chunk.end
    seq.num_in_flight_tokens -= end - chunk.start
    if chunk.sample is not None:
        seq.num_unknown_tokens -= 1
    return end


def _is_of_use(seq: Sequence, chunk: Chunk) -> bool:
    """Whether the KV is of a sequence that goes on, or of known tokens of one that was released.

    The others ended in a step before, when this one was planned already.
    """
    if seq.state is SequenceState.FINISHED:
        return chunk.follows is None and seq.num_computed_tokens == chunk.start
    return seq.state is SequenceState.RUNNING
