"""What a block has to hold, against a mask of every token that a later one sees."""

import pytest

from diptych.block_needs import BlockNeeds, GroupExtent, NeededRun, ShippedBytes
from diptych.v1 import common_pb2

SIZES = (100, 10, 1)  # bytes of the groups


def needed_by_mask(
    windows: tuple[int | None, ...], block_size: int, block_index: int, num_tokens: int
) -> int:
    """Bytes of the groups that any token from the sequence's last block on sees in a block."""
    last_begin = (num_tokens - 1) // block_size * block_size
    num_bytes = 0
    for window, size in zip(windows, SIZES, strict=False):
        sees = any(
            seen // block_size == block_index
            for token in range(last_begin, num_tokens + 1)
            for seen in range(0 if window is None else max(0, token - window + 1), token + 1)
            if seen < num_tokens
        )
        num_bytes += size * sees
    return num_bytes


@pytest.mark.parametrize("block_size", [1, 3, 4])
@pytest.mark.parametrize(
    "windows", [(None,), (None, 1), (None, 9, 2), (4,), (12, 5, 1), (None, 13)], ids=str
)
def test_every_block_of_every_length(windows: tuple[int | None, ...], block_size: int) -> None:
    groups = [GroupExtent(*group) for group in zip(windows, SIZES, strict=False)]
    needs = BlockNeeds(block_size, groups)
    for num_tokens in range(1, 31):
        num_blocks = -(-num_tokens // block_size)
        got = [needs.num_bytes_of(index, num_tokens) for index in range(num_blocks)]
        want = [
            needed_by_mask(windows, block_size, index, num_tokens) for index in range(num_blocks)
        ]
        assert got == want
        assert got[-1] == sum(SIZES[: len(windows)])


def test_runs_cover_the_blocks_and_are_cut_where_the_need_grows() -> None:
    needs = BlockNeeds(4, [GroupExtent(None, 100), GroupExtent(9, 10), GroupExtent(5, 1)])
    assert list(needs.runs(range(0, 6), 22)) == [
        NeededRun(range(0, 3), 100),
        NeededRun(range(3, 4), 110),
        NeededRun(range(4, 6), 111),
    ]
    assert list(needs.runs(range(2, 4), 22)) == [
        NeededRun(range(2, 3), 100),
        NeededRun(range(3, 4), 110),
    ]
    assert list(needs.runs(range(3, 3), 22)) == []


def test_a_layout_says_it() -> None:
    layout = common_pb2.KVLayout(
        block_size=4,
        block_bytes=30,
        groups=[
            common_pb2.KVGroup(kind=common_pb2.KV_KIND_FULL, block_bytes=10),
            common_pb2.KVGroup(kind=common_pb2.KV_KIND_SLIDING, window=5, block_bytes=20),
        ],
    )
    needs = BlockNeeds.of(layout)
    assert [needs.num_bytes_of(index, 12) for index in range(3)] == [10, 30, 30]
    whole = BlockNeeds.of(common_pb2.KVLayout(block_size=4, block_bytes=30))
    assert [whole.num_bytes_of(index, 12) for index in range(3)] == [30, 30, 30]


@pytest.mark.parametrize("windows", [(0,), (0, 1), (0, 9, 2), (4,), (12, 5, 1), (0, 13)], ids=str)
def test_what_placement_counts_is_what_is_shipped(windows: tuple[int, ...]) -> None:
    """Of whole blocks, whatever is there already; and nothing odd that is told can fail."""
    groups = [
        common_pb2.KVGroup(window=window, block_bytes=size)
        for window, size in zip(windows, SIZES, strict=False)
    ]
    layout = common_pb2.KVLayout(block_size=4, block_bytes=999, groups=groups)
    needs, shipped = BlockNeeds.of(layout), ShippedBytes.told(layout)
    for num_blocks in range(1, 9):
        for first in range(num_blocks + 1):
            runs = needs.runs(range(first, num_blocks), 4 * num_blocks)
            want = sum(run.num_bytes * len(run.blocks) for run in runs)
            assert shipped.of(4 * (num_blocks - first)) == want
    layout.groups.reverse()
    layout.block_size = 0
    assert ShippedBytes.told(layout).of(10) > 0
    assert ShippedBytes.told(common_pb2.KVLayout()).of(10) == ShippedBytes().of(10) == 0
