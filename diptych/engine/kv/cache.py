"""The paged KV memory of one worker, or one rank of it: one run of bytes, cut into blocks.

Owns the bytes, knows nothing of who uses which block (the block pool does) nor
when (the scheduler does). A block is ``[num_layers, 2, num_kv_heads]`` runs, keys
and values, layers that need more of the past before those that need less
(:mod:`diptych.engine.model.kv_groups`); a run holds one head of the block's tokens::

    float32, bfloat16, fp8   [block_size, head_dim] elements
    int8                     [block_size, head_dim] int8, padded to 4 bytes,
                             then [block_size] float32: the scale of each token

so a block, a group of its layers and a head of it are contiguous, scales included,
and nothing outside a block says what is in it. An int8 element stands for itself
times its token's scale, one of fp8 (e4m3) for itself; zeros everywhere are valid
and mean zeros.

Written by the model thread (slots of running sequences) and the transfer thread
(blocks being pulled); the block pool keeps them apart. ``diptych.worker.pool_memory``
makes it the ``PoolMemory`` of ``kvtransfer``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

import torch

from diptych.engine.kv.memory import HostKVMemory, KVMemory
from diptych.engine.model.config import ModelConfig
from diptych.engine.model.kv_groups import KVGroup
from diptych.errors import ConfigurationError
from diptych.formats import KVDtypeName

KV_DTYPES: Mapping[KVDtypeName, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}

_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class KVBlockLayout:
    """Where what lies in a block. Sizes in bytes unless named otherwise."""

    dtype: torch.dtype  # of the elements: one of KV_DTYPES
    block_size: int  # tokens
    head_dim: int  # elements; one for all groups, so that all runs are of one size
    groups: tuple[KVGroup, ...]  # one after another, whatever their layers' numbers
    first_runs: tuple[int, ...]  # of each layer of the model: where its runs begin in a block

    @classmethod
    def of(cls, config: ModelConfig, block_size: int, dtype: torch.dtype) -> Self:
        groups = config.kv_groups
        first_runs, num_runs = [0] * config.num_layers, 0
        for group in groups:
            for layer in group.layers:
                first_runs[layer] = num_runs
                num_runs += 2 * group.num_kv_heads
        return cls(dtype, block_size, config.head_dim, groups, tuple(first_runs))

    @property
    def num_runs(self) -> int:
        """Of a block."""
        return sum(map(_num_runs, self.groups))

    @property
    def has_scales(self) -> bool:
        return self.dtype is torch.int8

    @property
    def scales_offset(self) -> int:
        """Where a run's scales begin, or would: its elements and their padding."""
        num_bytes = self.block_size * self.head_dim * self.dtype.itemsize
        return -(-num_bytes // _SCALE_BYTES) * _SCALE_BYTES

    @property
    def run_bytes(self) -> int:
        """One head of one block: keys or values."""
        if not self.has_scales:
            return self.block_size * self.head_dim * self.dtype.itemsize
        return self.scales_offset + self.block_size * _SCALE_BYTES

    @property
    def block_bytes(self) -> int:
        """All layers, keys and values."""
        return self.num_runs * self.run_bytes

    def group_bytes(self, group: KVGroup) -> int:
        """A group's part of a block."""
        return _num_runs(group) * self.run_bytes


def _num_runs(group: KVGroup) -> int:
    return len(group.layers) * 2 * group.num_kv_heads


class KVCache:
    """All blocks of one rank, zeroed. Sizes in bytes; lives as long as the worker.

    ``tensor``: [num_blocks, num_layers, 2, num_kv_heads] runs, each [block_size,
    head_dim] where the elements are floats, [run_bytes] int8 where they have scales.
    Layers are in the layout's order: ``of_layer`` finds one.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        allocate: Callable[[int], KVMemory] = HostKVMemory,
    ) -> None:
        """allocate: gives so many zeroed bytes, where the cache is to lie.

        config: of what is computed in this process, with its key-value heads.

        Raises:
            ConfigurationError: it does not fit into memory.
            ValueError: sizes are not positive.
        """
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"need positive sizes, got {num_blocks=} {block_size=}")
        self.layout = KVBlockLayout.of(config, block_size, dtype)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.block_bytes = self.layout.block_bytes
        run = (self.layout.run_bytes,) if self.layout.has_scales else (block_size, config.head_dim)
        shape = (num_blocks, config.num_layers, 2, config.num_kv_heads, *run)
        try:
            self.memory = allocate(self.num_bytes)
        except (RuntimeError, MemoryError, OSError, OverflowError) as error:
            raise ConfigurationError(
                f"num_blocks or kv_cache_memory: no memory for {num_blocks} KV blocks of "
                f"{self.block_bytes} bytes"
            ) from error
        # Zeros, never empty: a slot nobody wrote must not hold a NaN.
        self.tensor = self.memory.bytes.view(dtype).view(shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def value_runs(self) -> int:
        """How many runs behind the keys of a head its values lie."""
        return self.tensor.shape[3]

    def first_run(self, layer: int) -> int:
        """Where in a block the keys of the first head lie."""
        return self.layout.first_runs[layer]

    def clear(self, num_blocks: int) -> None:
        """Zero the first blocks."""
        self.tensor[:num_blocks].zero_()

    def of_layer(self, layer: int) -> torch.Tensor:
        """A layer of the model in all blocks, in place: [num_blocks, 2, num_kv_heads] runs."""
        return self.tensor[:, self.layout.first_runs[layer] // (2 * self.value_runs)]


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: all layers, keys and values."""
    return KVBlockLayout.of(config, block_size, dtype).block_bytes
