"""The pools of several ranks are told as one is: the same bytes, the same digests."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.errors import ConfigurationError, DeviceLostError
from kvtransfer import host_sums
from kvtransfer.digest import Coverage, coverages
from kvtransfer.memory import HostMemory
from kvtransfer.rank_pools import RankPools

STRETCH, NUM_STRETCHES, NUM_BLOCKS = 4 * 192, 6, 5
BLOCK_BYTES = NUM_STRETCHES * STRETCH
SIZES = st.sampled_from([1, 2, 4])
RUNS = st.integers(1, NUM_STRETCHES).map(lambda num: num * STRETCH)
IDS = st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=3, unique=True)


class HostPools(RankPools):
    """Whose parts can be looked into."""

    parts: tuple[HostMemory, ...]


def pools(size: int) -> HostPools:
    num_bytes = NUM_BLOCKS * BLOCK_BYTES // size
    parts = [HostMemory(bytearray(num_bytes), BLOCK_BYTES // size) for _ in range(size)]
    return HostPools(parts, STRETCH)


def filled(size: int) -> tuple[HostPools, HostMemory]:
    """The same blocks in the pools of ranks and in one."""
    content = random.Random(size).randbytes(NUM_BLOCKS * BLOCK_BYTES)
    ranks = pools(size)
    ranks.write(range(NUM_BLOCKS), 0, content)
    return ranks, HostMemory(bytearray(content), BLOCK_BYTES)


def test_each_rank_has_its_part_of_each_stretch() -> None:
    ranks, one = filled(2)
    assert (ranks.block_bytes, ranks.num_blocks) == (BLOCK_BYTES, NUM_BLOCKS)
    for rank, part in enumerate(ranks.parts):
        for stretch in range(NUM_STRETCHES):
            begin = stretch * STRETCH + rank * STRETCH // 2
            own = bytes(part.block(3)[stretch * STRETCH // 2 :][: STRETCH // 2])
            assert own == one.block(3)[begin : begin + STRETCH // 2]


@settings(deadline=None)
@given(SIZES, IDS, RUNS, st.data())
def test_what_is_read_is_what_one_has(
    size: int, ids: list[int], num_bytes: int, data: st.DataObject
) -> None:
    ranks, one = filled(size)
    end = data.draw(st.integers(0, len(ids) * num_bytes))
    begin = data.draw(st.integers(0, end))
    assert ranks.read(ids, begin, end, num_bytes) == one.read(ids, begin, end, num_bytes)


@settings(deadline=None)
@given(SIZES, IDS, RUNS, st.data())
def test_what_is_written_is_where_one_has_it(
    size: int, ids: list[int], num_bytes: int, data: st.DataObject
) -> None:
    ranks, one = filled(size)
    offset = data.draw(st.integers(0, num_bytes - 1))
    payload = bytes([7]) * data.draw(st.integers(1, len(ids) * num_bytes - offset))
    for memory in (ranks, one):
        memory.write(ids, offset, payload, num_bytes)
    everything = (range(NUM_BLOCKS), 0, NUM_BLOCKS * BLOCK_BYTES)
    assert ranks.read(*everything) == one.read(*everything)


@settings(deadline=None)
@given(SIZES, IDS, RUNS, st.sampled_from([0, 1, 2**64 - 1]), st.booleans())
def test_digests_are_those_of_one(
    size: int, ids: list[int], num_bytes: int, seed: int, is_compiled: bool
) -> None:
    ranks, one = filled(size)
    wanted = coverages([num_bytes] * len(ids), seed, first_place=3)
    with pytest.MonkeyPatch.context() as patch:
        if not is_compiled:
            patch.setattr(host_sums, "_compiled", None)
        assert ranks.digests(ids, wanted) == one.digests(ids, wanted)
        assert ranks.digests(ids, [Coverage()] * len(ids)) == one.digests(
            ids, [Coverage()] * len(ids)
        )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_bit_in_any_rank_changes_the_digest(rank: int) -> None:
    ranks, _ = filled(2)
    before = ranks.digests([2], [Coverage()])
    ranks.parts[rank].block(2)[-1] ^= 1
    assert ranks.digests([2], [Coverage()]) != before


def test_blocks_beyond_the_pools_are_refused() -> None:
    ranks, _ = filled(2)
    for use in (
        lambda: ranks.read([NUM_BLOCKS], 0, 1),
        lambda: ranks.write([-1], 0, b"x"),
        lambda: ranks.digests([NUM_BLOCKS], [Coverage()]),
    ):
        with pytest.raises(IndexError):
            use()
    with pytest.raises(IndexError, match="1 bytes too many"):
        ranks.write([0], BLOCK_BYTES - 1, b"xy")


def test_parts_of_lines_are_refused() -> None:
    parts = [HostMemory(bytearray(192), 96) for _ in range(2)]
    with pytest.raises(
        ConfigurationError, match="tensor_parallel: 2 ranks cannot share the 192 bytes"
    ):
        RankPools(parts, 192)


def test_it_knows_when_a_ranks_device_is_lost() -> None:
    ranks, _ = filled(2)
    assert ranks.lost is None
    ranks.parts[1].lost = DeviceLostError("gone")
    assert ranks.lost is ranks.parts[1].lost
