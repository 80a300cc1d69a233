"""Reads and writes one layer's keys and values in the paged cache, by row numbers.

Knows the layout's arithmetic, not which blocks belong to whom. Model thread only.
"""

import torch
from torch import Tensor

from diptych.engine.kv_cache import KVCache
from diptych.engine.model_config import ModelConfig


class KVAccess:
    """Copies of a layer's keys and values, in and out.

    A row of the cache seen as ``[num_blocks * num_layers * 2 * num_kv_heads,
    block_size * head_dim]`` is one head of one block. index_select and index_copy_
    on such rows run near memory speed; indexing with several tensors does not.
    """

    def __init__(self, config: ModelConfig, kv_cache: KVCache) -> None:
        self.block_size, self.dtype = kv_cache.block_size, kv_cache.dtype
        self._head_dim = config.head_dim
        self._rows_per_layer = 2 * config.num_kv_heads
        self._rows_per_block = config.num_layers * self._rows_per_layer
        self._heads = kv_cache.tensor.view(-1, self.block_size * self._head_dim)
        self._slots = kv_cache.tensor.view(-1, self._head_dim)
        self._row_of_head = torch.arange(self._rows_per_layer, device=kv_cache.tensor.device)

    def slot_rows(self, slots: Tensor) -> Tensor:
        """Where layer 0 of these slots goes. slots: [N] -> [N * 2 * num_kv_heads]."""
        block_ids, offsets = slots // self.block_size, slots % self.block_size
        rows = block_ids[:, None] * self._rows_per_block + self._row_of_head
        return (rows * self.block_size + offsets[:, None]).view(-1)

    def write(self, layer: int, slot_rows: Tensor, kv: Tensor) -> None:
        """kv: [N, 2, num_kv_heads, head_dim]."""
        first = layer * self._rows_per_layer * self.block_size
        self._slots.index_copy_(0, slot_rows + first, kv.reshape(-1, self._head_dim))

    def block_rows(self, block_ids: Tensor) -> Tensor:
        """Where layer 0 of these blocks is. block_ids: [n] -> [2 * num_kv_heads * n]."""
        return (block_ids * self._rows_per_block + self._row_of_head[:, None]).view(-1)

    def read(self, layer: int, block_rows: Tensor) -> Tensor:
        """A copy: [2, num_kv_heads, n * block_size, head_dim]."""
        heads = self._heads.index_select(0, block_rows + layer * self._rows_per_layer)
        return heads.view(2, self._rows_per_layer // 2, -1, self._head_dim)
