"""Which local blocks a posted read may still write. Pure; event loop only."""

import enum
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Set
from typing import NamedTuple

from diptych.transitions import Transitions


class ReadState(enum.Enum):
    """Where a read that was handed to the transfer thread stands."""

    WANTED = enum.auto()  # its pull waits for it
    ORPHANED = enum.auto()  # its pull is over: its blocks are quarantined
    ENDED = enum.auto()  # it writes no more


class ReadEvent(enum.Enum):
    """What moves it."""

    ORPHAN = enum.auto()
    END = enum.auto()


READ_TRANSITIONS = Transitions(
    {
        ReadState.WANTED: {
            ReadEvent.ORPHAN: ReadState.ORPHANED,
            ReadEvent.END: ReadState.ENDED,
        },
        ReadState.ORPHANED: {ReadEvent.END: ReadState.ENDED},
    }
)


class ReadRecord:
    """One read that was handed to the transfer thread."""

    __slots__ = ("block_ids", "orphaned_at", "state", "transport")

    def __init__(self, block_ids: frozenset[int], transport: str) -> None:
        self.block_ids = block_ids
        self.transport = transport  # whose agent has to end for it to be over at once
        self.state = ReadState.WANTED
        self.orphaned_at = 0.0  # since when no pull wants it

    def move(self, event: ReadEvent) -> None:
        self.state = READ_TRANSITIONS.after(self.state, event) or self.state


class Quarantine:
    """Unfinished reads of all pulls of a worker that nobody waits for.

    A block is *quarantined* while an orphaned read names it. Reads of one pull
    may share a block (two inline messages): it is let go with the last of them. This is the
    one record of that: pools, gauges and pulls are told, or ask.
    """

    def __init__(
        self,
        on_begin: Callable[[frozenset[int]], None],
        on_end: Callable[[frozenset[int]], None],
    ) -> None:
        self._on_begin = on_begin
        self._on_end = on_end
        self.num_blocks_ever = 0  # quarantined; one counts each time anew
        self.num_open_reads = 0  # of all pulls, wanted or orphaned; PullReads counts
        self._orphans: set[ReadRecord] = set()
        self._num_reads: dict[int, int] = {}  # orphaned ones, by block

    @property
    def block_ids(self) -> Set[int]:
        """Quarantined now."""
        return self._num_reads.keys()

    def oldest_s(self, now: float) -> float:
        """Age of the oldest orphaned read, s; 0 without one."""
        return max((now - read.orphaned_at for read in self._orphans), default=0.0)

    def older_than(self, age_s: float, now: float) -> list[ReadRecord]:
        """Orphaned reads unfinished for longer than that."""
        return [read for read in self._orphans if now - read.orphaned_at > age_s]

    def orphan(self, reads: Collection[ReadRecord], now: float) -> frozenset[int]:
        """The pull of these unfinished reads ended. Returns their blocks."""
        block_ids = frozenset[int]().union(*(read.block_ids for read in reads))
        begun = block_ids - self._num_reads.keys()
        for read in reads:
            read.move(ReadEvent.ORPHAN)
            read.orphaned_at = now
            self._orphans.add(read)
            for block_id in read.block_ids:
                self._num_reads[block_id] = self._num_reads.get(block_id, 0) + 1
        if begun:
            self.num_blocks_ever += len(begun)
            self._on_begin(begun)
        return block_ids

    def ended(self, read: ReadRecord) -> None:
        """A read reached a terminal state (or never started): it writes no more."""
        was_orphaned = read.state is ReadState.ORPHANED
        read.move(ReadEvent.END)
        if not was_orphaned:
            return
        self._orphans.remove(read)
        ended = set()
        for block_id in read.block_ids:
            self._num_reads[block_id] -= 1
            if not self._num_reads[block_id]:
                del self._num_reads[block_id]
                ended.add(block_id)
        if ended:
            self._on_end(frozenset(ended))


class ReapLimits(NamedTuple):
    """How long orphaned reads are waited for before the agent that does them is torn down."""

    max_age_s: float  # of any of them
    grace_s: float  # that each has, however many blocks they hold
    max_blocks: float  # that those older than the grace may hold


def stuck_reads(
    quarantines: Iterable[Quarantine], now: float, limits: ReapLimits
) -> dict[str, set[int]]:
    """By transport: the blocks of reads that are too old, or younger and too many."""
    quarantines = tuple(quarantines)
    for age_s, max_blocks in ((limits.max_age_s, 0.0), (limits.grace_s, limits.max_blocks)):
        stuck = defaultdict[str, set[int]](set)
        for quarantine in quarantines:
            for read in quarantine.older_than(age_s, now):
                stuck[read.transport] |= read.block_ids
        if sum(map(len, stuck.values())) > max_blocks:
            return stuck
    return {}


class PullReads:
    """The unfinished reads of one pull, until it is over and its quarantine has them."""

    def __init__(self, quarantine: Quarantine, transport: str) -> None:
        self.abandoned = False
        self._quarantine = quarantine
        self._transport = transport
        self._unfinished: set[ReadRecord] = set()

    def begin(self, block_ids: frozenset[int]) -> ReadRecord:
        """A read into these blocks is about to be posted."""
        assert not self.abandoned, "a read for a pull that is over"
        read = ReadRecord(block_ids, self._transport)
        self._unfinished.add(read)
        self._quarantine.num_open_reads += 1
        return read

    def ended(self, read: ReadRecord) -> bool:
        """It writes no more; True if the pull still wants to know."""
        self._unfinished.remove(read)
        self._quarantine.num_open_reads -= 1
        self._quarantine.ended(read)
        return not self.abandoned

    def abandon(self, now: float) -> frozenset[int]:
        """The pull is over: what is unfinished is orphaned; its blocks. Idempotent."""
        if not self.abandoned:
            self.abandoned = True
            if self._unfinished:
                self._quarantine.orphan(self._unfinished, now)
        return frozenset[int]().union(*(read.block_ids for read in self._unfinished))
