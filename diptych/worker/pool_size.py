"""How many KV blocks a worker gets, and the longest sequence they allow. Pure."""

from typing import Final, NamedTuple

from diptych.errors import ConfigurationError

_LEAST_LEN: Final = 2  # tokens of the longest sequence: a prompt's, and one that is drawn


class PoolSize(NamedTuple):
    """``num_blocks`` blocks; no sequence longer than ``max_model_len`` tokens."""

    num_blocks: int
    max_model_len: int
    clipped: bool  # max_model_len was lowered to what the pool holds


def pool_size(
    *,
    num_blocks: int | None,
    memory_bytes: int,
    block_bytes: int,
    block_size: int,
    context_len: int,
    max_model_len: int | None,
    max_num_seqs: int,
    num_scratch_blocks: int,
    memory_setting: str = "kv_cache_memory",
) -> PoolSize:
    """Choose the pool: ``num_blocks`` if given, else what fits ``memory_bytes``.

    ``num_scratch_blocks`` lie behind it, and within ``memory_bytes`` too.
    By memory never more than ``max_num_seqs`` of the longest sequences need, so a
    small model does not take a gigabyte. ``context_len`` is the model's own limit,
    ``max_model_len`` the configured one (both in tokens). Raises ConfigurationError
    when the limits cannot be met; it names ``memory_setting``, which ``memory_bytes`` is from.
    """
    if max_model_len is not None and max_model_len > context_len:
        raise ConfigurationError(
            f"max_model_len: {max_model_len} is more than the model's context of {context_len}"
        )
    wanted_len, setting = max_model_len or context_len, "num_blocks"
    if num_blocks is None:
        setting = memory_setting
        blocks_per_seq = -(-wanted_len // block_size)
        fitting = memory_bytes // block_bytes
        num_blocks = min(fitting - num_scratch_blocks, max_num_seqs * blocks_per_seq + max_num_seqs)
        if num_blocks < 2:
            raise ConfigurationError(
                f"{memory_setting}: {memory_bytes} bytes hold {fitting} blocks of {block_bytes} "
                f"bytes; at least {2 + num_scratch_blocks} are needed"
            )
    longest = min(wanted_len, (num_blocks - 1) * block_size)  # one block is decode headroom
    if longest < _LEAST_LEN:
        raise ConfigurationError(
            f"{setting}: {num_blocks} blocks of {block_size} tokens are too few for a prompt of "
            "one and its answer"
        )
    return PoolSize(num_blocks, longest, clipped=longest < wanted_len)


def device_share(
    utilization: float,
    *,
    total_bytes: int,
    free_bytes: int,
    held_bytes: int,
    peak_bytes: int,
) -> int:
    """Bytes that a KV pool may take of a device: of this process's share, what steps leave.

    ``held_bytes`` of the device are this process's now (the weights), ``peak_bytes`` were in
    its largest step; ``free_bytes`` are nobody's. Raises ConfigurationError when nothing is
    left, or others have what the share promises.
    """
    share = int(utilization * total_bytes)
    left = share - peak_bytes
    if left <= 0:
        raise ConfigurationError(
            f"gpu_memory_utilization: {utilization} of the device's {total_bytes} bytes is no more "
            f"than the {peak_bytes} that the weights and the largest step take"
        )
    if share - held_bytes > free_bytes:
        raise ConfigurationError(
            f"gpu_memory_utilization: {utilization} of the device's {total_bytes} bytes needs "
            f"{share - held_bytes} more, but only {free_bytes} are free: others use the device"
        )
    return left
