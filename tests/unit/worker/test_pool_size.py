"""How many blocks a worker takes."""

import pytest

from diptych.errors import ConfigurationError
from diptych.worker.pool_size import PoolSize, pool_size


def size(
    *,
    num_blocks: int | None = None,
    memory_bytes: int = 1000 * 100,
    context_len: int = 1600,
    max_model_len: int | None = None,
    max_num_seqs: int = 64,
    num_scratch_blocks: int = 0,
) -> PoolSize:
    return pool_size(
        num_blocks=num_blocks,
        memory_bytes=memory_bytes,
        block_bytes=100,
        block_size=16,
        context_len=context_len,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        num_scratch_blocks=num_scratch_blocks,
    )


def test_memory_is_used_up() -> None:
    assert size() == PoolSize(1000, 1600, clipped=False)


def test_scratch_blocks_are_part_of_the_memory_and_not_of_the_pool() -> None:
    assert size(num_scratch_blocks=16).num_blocks == 1000 - 16
    assert size(num_scratch_blocks=16, max_num_seqs=2).num_blocks == 2 * 100 + 2
    assert size(num_scratch_blocks=16, num_blocks=128).num_blocks == 128


def test_no_more_than_the_longest_sequences_need() -> None:
    assert size(max_num_seqs=2).num_blocks == 2 * 100 + 2


def test_blocks_may_be_given() -> None:
    assert size(num_blocks=128, max_model_len=256) == PoolSize(128, 256, clipped=False)


def test_what_the_pool_cannot_hold_is_clipped() -> None:
    assert size(num_blocks=11) == PoolSize(11, 160, clipped=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_model_len": 1601}, "max_model_len: 1601"),
        ({"memory_bytes": 199}, "kv_cache_memory"),
        ({"memory_bytes": 1799, "num_scratch_blocks": 16}, "17 blocks .* at least 18"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        size(**arguments)
