"""Free block ids as runs, so that what is handed out together lies together.

Contiguous blocks are one descriptor for the transfer instead of many. Runs are
maximal and ascending, found by size class (powers of two) in O(log pool). Pure;
owned by the block pool.
"""


class FreeRuns:
    """A set of block ids kept as maximal runs ``[start, start + length)``."""

    def __init__(self, num_blocks: int) -> None:
        """All of ``range(num_blocks)`` is in the set."""
        self._num_blocks = 0
        self._length_at: dict[int, int] = {}  # start -> length
        self._start_of: dict[int, int] = {}  # end, exclusive -> start
        # Index c: starts of runs with 2**(c-1) <= length < 2**c. Dicts keep an order,
        # so that equal histories make equal choices.
        self._starts: list[dict[int, None]] = [{} for _ in range(num_blocks.bit_length() + 1)]
        self._put(0, num_blocks)

    def __len__(self) -> int:
        return self._num_blocks

    def add(self, block_id: int) -> None:
        """Put in a block that is not in the set, joining it to its neighbours."""
        start, end = block_id, block_id + 1
        if end in self._length_at:
            end += self._remove(end)
        if start in self._start_of:
            start = self._start_of[start]
            self._remove(start)
        self._put(start, end - start)

    def take(self, num_blocks: int, after: int | None = None) -> list[int]:
        """Take out exactly ``num_blocks`` (there must be so many) in as few runs as is easy.

        Begins with the run that follows block ``after`` if that is free.
        """
        taken: list[int] = []
        if after is not None and after + 1 in self._length_at and num_blocks:
            taken += self._cut(after + 1, num_blocks)
        while len(taken) < num_blocks:
            missing = num_blocks - len(taken)
            taken += self._cut(self._best_start(missing), missing)
        return taken

    def _best_start(self, num_blocks: int) -> int:
        """The smallest run that surely is long enough; else the longest there is, about."""
        sure = (num_blocks - 1).bit_length() + 1
        longer = self._starts[sure:]
        shorter = reversed(self._starts[:sure])
        for starts in (*longer, *shorter):
            if starts:
                return next(iter(starts))
        raise AssertionError("asked for more blocks than are free")

    def _cut(self, start: int, at_most: int) -> range:
        length = self._remove(start)
        num_taken = min(at_most, length)
        if num_taken < length:
            self._put(start + num_taken, length - num_taken)
        return range(start, start + num_taken)

    def _put(self, start: int, length: int) -> None:
        self._length_at[start] = length
        self._start_of[start + length] = start
        self._starts[length.bit_length()][start] = None
        self._num_blocks += length

    def _remove(self, start: int) -> int:
        length = self._length_at.pop(start)
        del self._start_of[start + length]
        del self._starts[length.bit_length()][start]
        self._num_blocks -= length
        return length
