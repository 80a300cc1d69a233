"""The paged KV memory of one worker: one tensor, cut into blocks.

Owns the bytes, knows nothing of who uses which block (the block pool does) nor
when (the scheduler does). Layout::

    tensor: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]

so a block, with all its layers, keys and values, is one contiguous run of
``block_bytes`` bytes. Written by the model thread (slots of running sequences)
and the transfer thread (blocks being pulled); the block pool keeps them apart.
It is the ``PoolMemory`` of ``kvtransfer``.
"""

import torch
from torch import Tensor

from diptych.engine.model_config import ModelConfig
from diptych.errors import ConfigurationError
from diptych.shared_bytes import SharedBytes


class KVCache:
    """All blocks of one worker, zeroed. Sizes in bytes; lives as long as the worker."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate and touch the memory.

        Raises:
            ConfigurationError: it does not fit into memory.
            ValueError: sizes are not positive.
        """
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"need positive sizes, got {num_blocks=} {block_size=}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.block_bytes = block_bytes(config, block_size, dtype)
        shape = (
            num_blocks,
            config.num_layers,
            2,
            config.num_kv_heads,
            block_size,
            config.head_dim,
        )
        # Where it is host memory: what a child process maps to read into it.
        self.shared: SharedBytes | None = None
        try:
            if torch.device(device).type == "cpu":
                self.shared = SharedBytes(self.num_bytes)
                empty = torch.frombuffer(self.shared.buffer, dtype=dtype).view(shape)
            else:
                empty = torch.empty(shape, dtype=dtype, device=device)
            # Zeros, never empty: a slot nobody wrote must not hold a NaN.
            self.tensor = empty.zero_()
        except (RuntimeError, MemoryError, OSError, OverflowError) as error:
            raise ConfigurationError(
                f"no memory for {num_blocks} KV blocks of {self.block_bytes} bytes"
            ) from error
        self._blocks: memoryview | None = (
            self.tensor.view(-1).view(torch.uint8).numpy().data
            if self.tensor.device.type == "cpu"
            else None
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def base_address(self) -> int:
        """Address of block 0; block ``i`` begins ``i * block_bytes`` after it."""
        return self.tensor.data_ptr()

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def memory_kind(self) -> str:
        """DRAM or VRAM."""
        return "DRAM" if self.tensor.device.type == "cpu" else "VRAM"

    @property
    def device_id(self) -> int:
        """Which device of its kind; 0 for the host."""
        return self.tensor.device.index or 0

    def block(self, block_id: int) -> memoryview:
        """The bytes of one block in place, writable: ``block_bytes`` unsigned bytes.

        Raises:
            IndexError: no such block.
            TypeError: the cache is not in host memory.
        """
        if self._blocks is None:
            raise TypeError("blocks in device memory have no host view")
        if not 0 <= block_id < self.num_blocks:
            raise IndexError(f"no block {block_id}, have {self.num_blocks}")
        begin = block_id * self.block_bytes
        return self._blocks[begin : begin + self.block_bytes]

    def layer(self, index: int) -> Tensor:
        """One layer's strided view: [num_blocks, 2, num_kv_heads, block_size, head_dim]."""
        return self.tensor[:, index]


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: all layers, keys and values."""
    per_token = config.num_layers * 2 * config.num_kv_heads * config.head_dim
    return per_token * block_size * dtype.itemsize
