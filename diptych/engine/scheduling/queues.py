"""Where each live sequence stands: its state, and the order in which sequences get their turn.

The scheduler's bookkeeping; knows no blocks and no budgets. Pure.
"""

import bisect
import itertools
from collections.abc import Iterator
from operator import attrgetter
from typing import NamedTuple

from diptych.engine.scheduling.sequence import Sequence, SequenceState

NEXT_STATES: dict[SequenceState, frozenset[SequenceState]] = {
    SequenceState.RESERVED: frozenset({SequenceState.WAITING, SequenceState.FINISHED}),
    SequenceState.WAITING: frozenset({SequenceState.RUNNING, SequenceState.FINISHED}),
    SequenceState.RUNNING: frozenset(
        {SequenceState.WAITING, SequenceState.LEASED, SequenceState.FINISHED}
    ),
    SequenceState.LEASED: frozenset({SequenceState.FINISHED}),
    SequenceState.FINISHED: frozenset(),
}
_by_arrival = attrgetter("arrival")
_by_class_and_arrival = attrgetter("gives_way", "arrival")


class GivingWay(NamedTuple):
    """Of those that run or wait, the sequences that others need not wait for."""

    num: int = 0  # those included that have left, and wait for blocks behind all others
    num_blocks: int = 0  # that these hold; shared ones are counted for each


class Queues:
    """Every live sequence is in exactly one of the three, as its state says."""

    def __init__(self) -> None:
        self.held: dict[Sequence, None] = {}  # RESERVED and LEASED, in order of admission
        self.waiting: list[Sequence] = []  # by arrival
        self.running: list[Sequence] = []  # by arrival
        self._arrivals = itertools.count(1)

    def __iter__(self) -> "itertools.chain[Sequence]":
        return itertools.chain(self.running, self.waiting, self.held)

    @property
    def runnable(self) -> "itertools.chain[Sequence]":
        """Those in the batch, and those that want to be."""
        return itertools.chain(self.running, self.waiting)

    def add_reserved(self, seq: Sequence) -> None:
        """A new sequence, RESERVED from birth."""
        assert seq.state is SequenceState.RESERVED, f"reserved while {seq.state.name}"
        assert seq not in self.held, "reserved twice"
        self.held[seq] = None

    def add_arrival(self, seq: Sequence) -> None:
        """A new or RESERVED sequence becomes runnable, as the youngest: -> WAITING."""
        self.held.pop(seq, None)
        _move(seq, SequenceState.WAITING)
        seq.arrival = next(self._arrivals)
        self.waiting.append(seq)

    def run(self, seq: Sequence) -> None:
        """WAITING -> RUNNING."""
        self._remove(seq)
        _move(seq, SequenceState.RUNNING)
        bisect.insort(self.running, seq, key=_by_arrival)

    def wait_again(self, seq: Sequence) -> None:
        """RUNNING -> WAITING, with its old place in the order."""
        self._remove(seq)
        _move(seq, SequenceState.WAITING)
        bisect.insort(self.waiting, seq, key=_by_arrival)

    def lease(self, seq: Sequence) -> None:
        """RUNNING -> LEASED."""
        self._remove(seq)
        _move(seq, SequenceState.LEASED)
        seq.preparation = None  # nothing more is drawn
        self.held[seq] = None

    def finish(self, seq: Sequence) -> None:
        """-> FINISHED: no longer known."""
        self._remove(seq)
        _move(seq, SequenceState.FINISHED)

    def count_reserved(self) -> int:
        """Those that are to run once their KV or their start has come. O(held)."""
        return sum(seq.state is SequenceState.RESERVED for seq in self.held)

    def first_served(self) -> list[Sequence]:
        """Those that wait for a place, but for those that give way, and could run now."""
        return [seq for seq in self.waiting if seq.is_prepared and not seq.gives_way]

    def first_to_leave(self) -> Sequence:
        """Whose blocks go first, of those that nobody else reads; there must be one.

        The last come of those that give way, else of all.
        """
        return max(filter(_may_leave, self.runnable), key=_by_class_and_arrival)

    def giving_way(self) -> list[Sequence]:
        """Those that leave for others, the last come first; nobody else reads their blocks."""
        return sorted(filter(_may_leave, self._yielding()), key=_by_arrival, reverse=True)

    def giving_places(self) -> list[Sequence]:
        """Those in the batch that sit out for others, the last come first."""
        return [seq for seq in reversed(self.running) if seq.gives_way]

    def count_giving_way(self) -> GivingWay:
        """How many those are, and how many have left. O(runnable)."""
        tables = [seq.block_table for seq in self._yielding()]
        return GivingWay(len(tables), sum(map(len, tables)))

    def _yielding(self) -> Iterator[Sequence]:
        return (seq for seq in self.runnable if seq.gives_way and not seq.prefill_only)

    def _remove(self, seq: Sequence) -> None:
        if seq.state is SequenceState.WAITING:
            self.waiting.remove(seq)
        elif seq.state is SequenceState.RUNNING:
            self.running.remove(seq)
        else:
            self.held.pop(seq, None)  # it may have been refused


def _may_leave(seq: Sequence) -> bool:
    return bool(seq.block_table) and not seq.prefill_only


def _move(seq: Sequence, state: SequenceState) -> None:
    assert state in NEXT_STATES[seq.state], f"{seq.state.name} -> {state.name}"
    seq.state = state
