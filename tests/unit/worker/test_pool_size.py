"""How many blocks a worker takes."""

import pytest

from diptych.errors import ConfigurationError
from diptych.worker.pool_size import PoolSize, device_share, pool_size


def size(
    *,
    num_blocks: int | None = None,
    memory_bytes: int = 1000 * 100,
    context_len: int = 1600,
    max_model_len: int | None = None,
    max_num_seqs: int = 64,
    num_scratch_blocks: int = 0,
    block_size: int = 16,
) -> PoolSize:
    return pool_size(
        num_blocks=num_blocks,
        memory_bytes=memory_bytes,
        block_bytes=100,
        block_size=block_size,
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
        ({"num_blocks": 2, "block_size": 1}, "^num_blocks: 2 blocks of 1 tokens"),
        ({"memory_bytes": 299, "block_size": 1}, "^kv_cache_memory: 2 blocks of 1 tokens"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        size(**arguments)


def test_the_setting_that_the_memory_is_from_is_named() -> None:
    with pytest.raises(
        ConfigurationError, match=r"^gpu_memory_utilization: 199 bytes hold 1 blocks"
    ):
        pool_size(
            num_blocks=None,
            memory_bytes=199,
            block_bytes=100,
            block_size=16,
            context_len=1600,
            max_model_len=None,
            max_num_seqs=64,
            num_scratch_blocks=0,
            memory_setting="gpu_memory_utilization",
        )


def share(utilization: float, *, free_bytes: int = 800, peak_bytes: int = 300) -> int:
    """Of a device of 1,000 bytes with weights of 200."""
    return device_share(
        utilization,
        total_bytes=1000,
        free_bytes=free_bytes,
        held_bytes=200,
        peak_bytes=peak_bytes,
    )


def test_the_pool_gets_what_the_largest_step_leaves() -> None:
    assert share(0.9) == 600
    assert share(1.0) == 700
    assert share(0.5, free_bytes=300) == 200, "another process has 500"
    assert share(0.301) == 1


@pytest.mark.parametrize(
    ("utilization", "free_bytes", "says"),
    [
        (0.3, 800, "0.3 of the device's 1000 bytes is no more than the 300"),
        (0.1, 800, "no more than the 300"),
        (0.9, 699, "needs 700 more, but only 699 are free: others"),
    ],
)
def test_a_share_that_is_too_small_or_not_there(
    utilization: float, free_bytes: int, says: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"^gpu_memory_utilization: .*{says}"):
        share(utilization, free_bytes=free_bytes)
