"""What ranks read of each other is every byte of a block once, to where it belongs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.block_shares import BlockShare, Move, moves

RANKS = st.sampled_from([1, 2, 3, 4, 6, 12])
NUM_STRETCHES = 3


def shares_of(size: int, stretch: int) -> list[BlockShare]:
    return [BlockShare(rank, size, stretch // size) for rank in range(size)]


def parted(block: bytes, size: int) -> list[bytearray]:
    """A whole block's parts in the pools of so many ranks."""
    return [
        bytearray(
            byte for i, byte in enumerate(block) if share.own_before(i + 1) > share.own_before(i)
        )
        for share in shares_of(size, len(block) // NUM_STRETCHES)
    ]


def moved(move: Move, source: bytearray, target: bytearray, num_stretches: int) -> int:
    """Do as a read would; how many bytes."""
    if move.pieces is None:
        num_bytes = num_stretches * move.num_bytes
        target[:num_bytes] = source[:num_bytes]
        return num_bytes
    size, pieces = move.pieces.num_bytes, move.pieces
    for stretch in range(num_stretches):
        theirs = pieces.source_begin + stretch * pieces.source_stride
        ours = pieces.local_begin + stretch * pieces.local_stride
        target[ours : ours + size] = source[theirs : theirs + size]
    return num_stretches * size


@given(RANKS, RANKS, st.integers(1, 3), st.integers(1, NUM_STRETCHES))
def test_a_reader_of_any_degree_gets_its_part_of_all(
    num_source: int, num_reader: int, head_bytes: int, num_stretches: int
) -> None:
    block = bytes(i % 251 for i in range(NUM_STRETCHES * 12 * head_bytes))
    sources, targets = parted(block, num_source), parted(bytes(len(block)), num_reader)
    num_moved = sum(
        moved(move, sources[move.source_rank], targets[move.reader_rank], num_stretches)
        for move in moves(num_source, num_reader, 12 * head_bytes)
    )
    num_bytes = num_stretches * 12 * head_bytes
    assert num_moved == num_bytes, "nothing is read twice"
    assert targets == parted(block[:num_bytes].ljust(len(block), b"\0"), num_reader)


@given(RANKS, st.integers(0, 72), st.integers(0, 72))
def test_any_bytes_of_a_block_are_each_of_one_rank(size: int, first: int, last: int) -> None:
    begin, end = sorted((first, last))
    shares = shares_of(size, 24)
    assert sum(each.own_before(end) - each.own_before(begin) for each in shares) == end - begin
    for place in range(begin, end):
        owner = place % 24 // (24 // size)
        assert [each.own_before(place + 1) - each.own_before(place) for each in shares] == [
            int(rank == owner) for rank in range(size)
        ]


def test_equal_ranks_read_whole_blocks() -> None:
    assert moves(2, 2, 64) == [Move(0, 0, 32, None), Move(1, 1, 32, None)]


def test_half_of_each_stretch_is_read_by_each_of_two() -> None:
    first, second = moves(1, 2, 64)
    assert (first.source_rank, first.reader_rank, first.num_bytes) == (0, 0, 32)
    assert first.pieces == (32, 0, 64, 0, 32)
    assert (second.source_rank, second.reader_rank) == (0, 1)
    assert second.pieces == (32, 32, 64, 0, 32)


@pytest.mark.parametrize(("source", "reader", "named"), [(0, 1, 0), (5, 1, 5), (1, 5, 5)])
def test_what_cannot_be_shared_is_no_plan(source: int, reader: int, named: int) -> None:
    with pytest.raises(ValueError, match=f"64 bytes of heads .* by {named} ranks"):
        moves(source, reader, 64)
