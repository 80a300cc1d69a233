"""Who is let in: new sequences to blocks, and those that wait to the batch.

The scheduler asks for both; this knows whom blocks are owed to, and who had better wait for
what another one computes. Moves sequences in the queues and fills their tables. Pure.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping

from diptych.engine.scheduling.block_pool import Owner
from diptych.engine.scheduling.block_tables import BlockTables
from diptych.engine.scheduling.prefill_shares import PrefillShares
from diptych.engine.scheduling.queues import Queues
from diptych.engine.scheduling.sequence import Sequence, SequenceState
from diptych.engine.scheduling.turns import Turns
from diptych.errors import BlocksExhaustedError, InvalidRequestError


class Admission:
    """Over one scheduler's queues and tables. At most ``max_num_seqs`` are in the batch."""

    def __init__(
        self,
        queues: Queues,
        tables: BlockTables,
        turns: Turns,
        *,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        self.num_lookup_tokens = 0  # so far, tokens of new sequences
        self.num_hit_tokens = 0  # so far, of those found in the prefix cache
        self._queues = queues
        self._tables = tables
        self._turns = turns
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len

    def admit_new(
        self, seq: Sequence, owner: Owner, *, max_cached_tokens: int, to_pull: bool = False
    ) -> None:
        """Give a sequence that nobody knows its blocks, see ``BlockTables.admit``.

        Raises InvalidRequestError, BlocksExhaustedError; nothing is then held.
        """
        if not 0 < seq.num_tokens < self._max_model_len:
            raise InvalidRequestError(
                f"{seq.num_tokens} is not within 1 and {self._max_model_len - 1}",
                field="token_ids",
            )
        seq.num_cached_tokens = self._tables.admit(
            seq,
            owner,
            max_cached_tokens=max_cached_tokens,
            keep=self._num_owed_blocks(seq),
            to_pull=to_pull,
        )
        self.num_lookup_tokens += seq.num_tokens
        self.num_hit_tokens += seq.num_cached_tokens

    def num_needed_blocks(self, seq: Sequence) -> int:
        """How many have to be available for a new one that hits nothing."""
        return self._tables.num_wanted_blocks(seq) + self._num_owed_blocks(seq)

    def _num_owed_blocks(self, newcomer: Sequence) -> int:
        """What preempted sequences wait for is not given to newcomers, unless those go first."""
        preempted = (
            seq
            for seq in self._queues.waiting
            if not seq.block_table and seq.gives_way <= newcomer.gives_way
        )
        return sum(map(self._tables.num_wanted_blocks, preempted))

    def admit_again(self, seq: Sequence) -> bool:
        """Give one that lost its blocks others, if there are enough."""
        try:
            self._tables.admit(seq, Owner.RUNNING, max_cached_tokens=seq.num_tokens - 1)
        except BlocksExhaustedError:
            return False
        return True

    def decoding_next(self) -> list[Sequence]:
        """Those that wait for no more than a single token get into the batch now.

        None that gives way; and where places are short all wait for their turn.
        """
        waiting = self._queues.first_served()
        if len(self._queues.running) + len(waiting) > self._max_num_seqs:
            return []
        decoding = [seq for seq in waiting if seq.block_table and seq.decodes_next]
        for seq in decoding:
            self._queues.run(seq)
        return decoding

    def in_turn(
        self,
        prefilling: Iterable[Sequence],
        shares: PrefillShares,
        in_flight: Mapping[Sequence, int],
    ) -> Iterator[Sequence]:
        """Of those in the batch, these, and of those that wait whoever gets into it now.

        in_flight: where chunks of known tokens end whose step has not.
        Each is to ``take`` its share before the next one is asked for. Payers take turns; of one
        payer first come, first served among those that lack blocks, and those that have theirs do
        not wait behind them. Who gives way comes behind all others, and nobody waits behind one
        that is not prepared.
        """
        may_admit = True
        waiting = (seq for seq in self._queues.waiting if seq.is_prepared)
        for seq in self._turns.in_turn(itertools.chain(prefilling, waiting)):
            if shares.is_spent:
                return
            if seq.state is SequenceState.RUNNING:
                yield seq
                continue
            if len(self._queues.running) >= self._max_num_seqs:
                continue
            if not seq.block_table:
                may_admit = may_admit and shares.has_room_for(seq) and self.admit_again(seq)
                if not may_admit:
                    continue
            else:
                self._refresh(seq)
                if (
                    self._is_being_computed(seq, shares.ends)
                    or (in_flight and self._is_being_computed(seq, in_flight))
                    or not shares.has_room_for(seq)
                ):
                    continue
            self._queues.run(seq)
            yield seq

    def _refresh(self, seq: Sequence) -> None:
        before = seq.num_computed_tokens
        self._tables.refresh(seq, Owner.RUNNING)
        self.num_hit_tokens += seq.num_computed_tokens - before

    def _is_being_computed(self, seq: Sequence, ends: Mapping[Sequence, int]) -> bool:
        """Whether another one's chunk enters the next block that it lacks."""
        missing = self._tables.missing_blocks(seq)
        return bool(missing) and any(
            self._tables.will_enter(other, end, seq, missing.start) for other, end in ends.items()
        )
