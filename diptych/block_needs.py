"""What a KV block has to hold, so that the tokens behind it can be computed. Pure.

The layers of a model are in groups, and the groups lie in a block one after another, those
first that see most of the past. So what a block has to hold is always its first groups, its
first bytes; the others of it may be a *hole*, of any content. Both sides of a hand-off and
the prefix cache ask here.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

from diptych.v1 import common_pb2


class GroupExtent(NamedTuple):
    """One group of layers."""

    window: int | None  # a token sees itself and window - 1 before it; None: all
    num_bytes: int  # of it in a block


class ShippedBytes(NamedTuple):
    """What is shipped of a sequence, by how many of its last tokens the reader lacks.

    As if blocks were cut anywhere, so that placement may weigh parts of them.
    """

    groups: tuple[
        tuple[float, int | None], ...
    ] = ()  # bytes of a token, and of how many; None: all

    @classmethod
    def told(cls, layout: common_pb2.KVLayout) -> Self:
        """Of the layout that a worker tells, whatever it tells: nothing here is refused."""
        size = layout.block_size or 1
        groups = [
            (group.block_bytes / size, (_reach(group.window, size) + 1) * size)
            if group.window
            else (group.block_bytes / size, None)
            for group in layout.groups
        ]
        return cls(tuple(groups)) if groups else cls.even(layout.block_bytes / size)

    @classmethod
    def even(cls, bytes_per_token: float) -> Self:
        """Of tokens that are all shipped whole."""
        return cls(((bytes_per_token, None),))

    def of(self, num_tokens: float) -> float:
        """Bytes of the last so many tokens; 0 where nobody said what a token takes."""
        num_bytes = 0.0
        for size, most in self.groups:
            num_bytes += size * (num_tokens if most is None else min(num_tokens, most))
        return num_bytes


NOTHING_SHIPPED = ShippedBytes()


class BlockNeeds:
    """Of the blocks of one layout. Immutable."""

    def __init__(self, block_size: int, groups: Sequence[GroupExtent]) -> None:
        """groups: as they lie in a block, at least one, none that sees more than one before it."""
        self.block_size = block_size
        self._bytes_of_first = [0]  # groups
        for group in groups:
            self._bytes_of_first.append(self._bytes_of_first[-1] + group.num_bytes)
        windows = [group.window for group in groups]
        self._num_full = windows.count(None)
        assert None not in windows[self._num_full :], "a full group behind a window"
        self.reaches = tuple(_reach(window, block_size) for window in windows if window is not None)
        """Of each group with a window: how many blocks before its own a block's tokens see."""
        assert list(self.reaches) == sorted(self.reaches, reverse=True), "a window behind a shorter"

    @classmethod
    def of(cls, layout: common_pb2.KVLayout) -> Self:
        """Of the layout that a worker tells; one that names no groups is full attention."""
        groups = [GroupExtent(group.window or None, group.block_bytes) for group in layout.groups]
        return cls(layout.block_size, groups or [GroupExtent(None, layout.block_bytes)])

    @classmethod
    def whole(cls, block_size: int, block_bytes: int = 0) -> Self:
        """Of blocks that are always needed whole."""
        return cls(block_size, [GroupExtent(None, block_bytes)])

    @property
    def num_groups(self) -> int:
        return len(self._bytes_of_first) - 1

    @property
    def num_full_groups(self) -> int:
        """Those without a window, which every block needs."""
        return self._num_full

    def num_groups_of(self, block_index: int, last_block: int) -> int:
        """The first so many groups that a block of a sequence needs.

        For every token from the first one of ``last_block`` on, whichever is computed next.
        """
        behind = last_block - block_index
        return self._num_full + sum(behind <= reach for reach in self.reaches)

    def num_bytes_of(self, block_index: int, num_tokens: int) -> int:
        """The first so many bytes that a block of a sequence of ``num_tokens`` needs.

        What follows can go on behind the sequence, and may compute its last block once more.
        """
        last_block = (num_tokens - 1) // self.block_size
        return self._bytes_of_first[self.num_groups_of(block_index, last_block)]

    def runs(self, blocks: range, num_tokens: int) -> Iterator["NeededRun"]:
        """Consecutive blocks of such a sequence, cut where the need grows."""
        first = blocks.start
        while first < blocks.stop:
            num_bytes, end = self.num_bytes_of(first, num_tokens), first + 1
            while end < blocks.stop and self.num_bytes_of(end, num_tokens) == num_bytes:
                end += 1
            yield NeededRun(range(first, end), num_bytes)
            first = end


class NeededRun(NamedTuple):
    """Blocks of a sequence of which as much is needed."""

    blocks: range  # their indices in the sequence
    num_bytes: int  # of each, from its beginning on; may be 0


def _reach(window: int, block_size: int) -> int:
    """How many blocks before its own a block's tokens see."""
    return -(-(window - 1) // block_size)
