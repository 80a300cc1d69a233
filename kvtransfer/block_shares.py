"""How ranks share out the heads of KV blocks, and what one reads of another. Pure.

A whole block has, for the keys and for the values of each layer, one *stretch*: all heads,
one after another. A rank of a worker has the same number of heads of each stretch, in the
order of the ranks, and a block of its pool is its parts of all stretches. So the first
bytes of a whole block, up to the end of a stretch, are the first bytes of each rank's.
Light imports: the processes of agents load it.
"""

from typing import NamedTuple


class BlockShare(NamedTuple):
    """What one rank has of each whole block."""

    rank: int
    size: int  # ranks
    own_bytes: int  # of each stretch

    @property
    def stretch_bytes(self) -> int:
        return self.size * self.own_bytes

    def own_before(self, begin: int) -> int:
        """How many of the bytes before this one, of whole blocks one after another, are its own."""
        stretch, place = divmod(begin, self.stretch_bytes)
        first = self.rank * self.own_bytes
        return stretch * self.own_bytes + min(max(place - first, 0), self.own_bytes)


class Pieces(NamedTuple):
    """What reads of a peer take of each block, and where it goes, if not all from its beginning on.

    Pieces of one size, at even distances in the source's block and in ours.
    """

    num_bytes: int  # of each
    source_begin: int  # of the first one, in a block
    source_stride: int
    local_begin: int
    local_stride: int


class Move(NamedTuple):
    """What one rank of a reader reads of one rank of a source."""

    source_rank: int
    reader_rank: int
    num_bytes: int  # of each stretch
    pieces: Pieces | None  # None: whole blocks of the source rank are whole ones of the reader's


def moves(num_source_ranks: int, num_reader_ranks: int, stretch_bytes: int) -> list[Move]:
    """All that a reader reads, of which each byte of a whole block is in one.

    Raises ValueError: a stretch cannot be shared out so.
    """
    for num in (num_source_ranks, num_reader_ranks):
        if num < 1 or stretch_bytes % num:
            raise ValueError(f"{stretch_bytes} bytes of heads cannot be shared by {num} ranks")
    source_bytes, reader_bytes = (
        stretch_bytes // num_source_ranks,
        stretch_bytes // num_reader_ranks,
    )
    planned = []
    for reader in range(num_reader_ranks):
        for source in range(num_source_ranks):
            source_begin, reader_begin = source * source_bytes, reader * reader_bytes
            low = max(source_begin, reader_begin)
            num_bytes = min(source_begin + source_bytes, reader_begin + reader_bytes) - low
            if num_bytes <= 0:
                continue
            pieces = Pieces(
                num_bytes=num_bytes,
                source_begin=low - source_begin,
                source_stride=source_bytes,
                local_begin=low - reader_begin,
                local_stride=reader_bytes,
            )
            is_whole = num_source_ranks == num_reader_ranks
            planned.append(Move(source, reader, num_bytes, None if is_whole else pieces))
    return planned
