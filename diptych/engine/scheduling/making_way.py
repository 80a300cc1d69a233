"""Who leaves for whom: sequences that give way, for those that do not. Pure.

Blocks go back whole, of the last come first, and only as many sequences leave as are needed. If
one of them is at work, they leave together when its step has ended. Where a place in the batch is
all that is wanted, it sits out and keeps its blocks. No blocks go back that others may read, and
none where too few would come of it.
"""

import itertools
from collections import Counter
from collections.abc import Callable

from diptych.engine.scheduling.block_pool import BlockPool
from diptych.engine.scheduling.block_tables import BlockTables
from diptych.engine.scheduling.queues import Queues
from diptych.engine.scheduling.sequence import Sequence, SequenceState


class MakingWay:
    """Over one scheduler's queues, tables and pool."""

    def __init__(
        self,
        queues: Queues,
        tables: BlockTables,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        preempt: Callable[[Sequence], None],
    ) -> None:
        """``preempt`` takes a sequence's blocks, and has it wait."""
        self.num_set_aside = 0  # so far, times that somebody lost its place alone
        self._queues = queues
        self._tables = tables
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._preempt = preempt
        self._leaving: list[Sequence] = []  # with the end of the steps that they are in
        self.set_aside: list[Sequence] = []  # they left their places for the step being decided

    @property
    def is_under_way(self) -> bool:
        """Whether somebody leaves with the end of a step in flight."""
        return bool(self._leaving)

    @property
    def is_wanted(self) -> bool:
        """Whether those that wait would have others leave that run."""
        waiting = self._queues.first_served()
        if not waiting:
            return False
        if self._num_over(waiting) > 0 and self._queues.giving_places():
            return True
        lacks_blocks = not all(seq.block_table for seq in waiting)
        return lacks_blocks and bool(self._queues.giving_way())

    def make_room(self, num_blocks: int) -> bool:
        """Have some leave until so many blocks are available; False: too few would be.

        They are there when it is not ``is_under_way``.
        """
        num_left = num_blocks - self._pool.num_available_blocks
        others = (seq for seq in self._queues.giving_way() if seq not in self._leaving)
        leaving: list[Sequence] = []
        held: Counter[int] = Counter()
        for seq in itertools.chain(self._leaving, others):
            if num_left <= 0 and seq not in self._leaving:
                break
            leaving.append(seq)
            held.update(seq.block_table)
            num_left -= sum(map(self._is_freed, seq.block_table, map(held.get, seq.block_table)))
        if num_left > 0:
            return False
        if any(seq.num_in_flight_tokens for seq in leaving):
            self._leaving = leaving
            return True
        for seq in leaving:
            self._preempt(seq)
        return True

    def let_leave(self) -> None:
        """A step was booked: those that are in none any more leave.

        Who has ended by itself goes with the last step that it is in.
        """
        leaving = [seq for seq in self._leaving if seq.block_table]
        self._leaving = [seq for seq in leaving if seq.num_in_flight_tokens]
        for seq in leaving:
            if not seq.num_in_flight_tokens:
                self._preempt(seq)

    def make_way(self) -> None:
        """Let some leave for those that wait. No step is in flight; one is being decided."""
        self.set_aside = []
        waiting, num_blocks = self._queues.first_served(), 0
        for seq in waiting:
            if not seq.block_table:
                num_blocks += self._tables.num_wanted_blocks(seq)
                if not self.make_room(num_blocks):
                    break
        if waiting:
            num_over = max(0, self._num_over(waiting))
            self.set_aside = self._queues.giving_places()[:num_over]
            for seq in self.set_aside:
                self._queues.wait_again(seq)

    def count_set_aside(self) -> None:
        """The step was decided: some may have got a place again."""
        self.num_set_aside += sum(not _is_running(seq) for seq in self.set_aside)
        self.set_aside = []

    def _num_over(self, waiting: list[Sequence]) -> int:
        """How many places they lack."""
        return len(self._queues.running) + len(waiting) - self._max_num_seqs

    def _is_freed(self, block_id: int, num_holders: int | None) -> bool:
        """Whether nobody holds it when so many holders have left."""
        if self._pool.is_quarantined(block_id):
            return False
        return sum(self._pool.holders(block_id).values()) == num_holders


def _is_running(seq: Sequence) -> bool:
    return seq.state is SequenceState.RUNNING
