"""Which local blocks a posted read may still write. Pure; event loop only."""

from collections.abc import Callable, Collection, Set


class ReadRecord:
    """One read that was handed to the transfer thread and has not ended."""

    __slots__ = ("block_ids", "orphaned_at")

    def __init__(self, block_ids: frozenset[int]) -> None:
        self.block_ids = block_ids
        self.orphaned_at: float | None = None  # since when no pull wants it


class Quarantine:
    """Unfinished reads of all pulls of a worker, and those among them nobody waits for.

    A block is *quarantined* while an orphaned read names it. Reads of one pull
    may share a block (two inline messages): it is let go with the last of them.
    """

    def __init__(
        self,
        on_begin: Callable[[frozenset[int]], None],
        on_end: Callable[[frozenset[int]], None],
    ) -> None:
        self._on_begin = on_begin
        self._on_end = on_end
        self._orphans: set[ReadRecord] = set()
        self._num_reads: dict[int, int] = {}  # orphaned ones, by block

    @property
    def block_ids(self) -> Set[int]:
        """Quarantined now."""
        return self._num_reads.keys()

    def oldest_s(self, now: float) -> float:
        """Age of the oldest orphaned read, s; 0 without one."""
        return max((now - r.orphaned_at for r in self._orphans if r.orphaned_at), default=0.0)

    def orphan(self, reads: Collection[ReadRecord], now: float) -> frozenset[int]:
        """The pull of these unfinished reads ended. Returns their blocks."""
        block_ids = frozenset[int]().union(*(read.block_ids for read in reads))
        begun = block_ids - self._num_reads.keys()
        for read in reads:
            read.orphaned_at = now
            self._orphans.add(read)
            for block_id in read.block_ids:
                self._num_reads[block_id] = self._num_reads.get(block_id, 0) + 1
        if begun:
            self._on_begin(begun)
        return block_ids

    def ended(self, read: ReadRecord) -> None:
        """A read reached a terminal state (or never started): it writes no more."""
        if read not in self._orphans:
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
