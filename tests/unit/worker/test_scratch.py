"""Blocks for probes."""

import pytest

from diptych.errors import BlocksExhaustedError
from diptych.worker.scratch import PoolScratch


def test_each_block_is_lent_to_one() -> None:
    scratch = PoolScratch(range(64, 72))
    first, second = scratch.allocate(4), scratch.allocate(4)
    assert sorted(first + second) == list(range(64, 72))
    assert scratch.num_lent == 8
    scratch.free(first[1:])
    assert sorted(scratch.allocate(3)) == sorted(first[1:])


def test_it_is_all_or_nothing() -> None:
    scratch = PoolScratch(range(8))
    scratch.allocate(6)
    with pytest.raises(BlocksExhaustedError, match="need 3 scratch blocks, 2 free"):
        scratch.allocate(3)
    assert scratch.num_lent == 6
    assert len(scratch.allocate(2)) == 2


@pytest.mark.parametrize("block_id", [0, 2])
def test_what_was_not_lent_cannot_come_back(block_id: int) -> None:
    scratch = PoolScratch(range(2))
    with pytest.raises(AssertionError, match="lent"):
        scratch.free([block_id])
