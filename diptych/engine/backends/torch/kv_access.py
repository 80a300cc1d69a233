"""Reads and writes one layer's keys and values in the paged cache, by row numbers.

Knows the layout's arithmetic, not which blocks belong to whom. Model thread only.
"""

import torch
from torch import Tensor

from diptych.engine.backends.torch.fp8_linear import LARGEST
from diptych.engine.backends.torch.int8_linear import quantise
from diptych.engine.kv.cache import KVCache
from diptych.engine.model.config import ModelConfig


class KVAccess:
    """Copies of a layer's keys and values, in and out, as the model's element type.

    A row of the cache is one run: one head of one block. index_select and index_copy_
    on whole rows run near memory speed; indexing with several tensors does not.
    """

    def __init__(self, config: ModelConfig, kv_cache: KVCache, dtype: torch.dtype) -> None:
        """dtype: the model's, of what is written and read; the cache may have another."""
        assert config.num_kv_heads == kv_cache.value_runs, "heads of another cache"
        self.block_size = kv_cache.block_size
        self._dtype = dtype
        self._cache, self._layout = kv_cache, kv_cache.layout
        self.head_dim = config.head_dim
        self._num_kv_heads = config.num_kv_heads
        self._rows_per_block = self._layout.num_runs
        self._runs = kv_cache.tensor.view(kv_cache.num_blocks * self._rows_per_block, -1)
        # Not every device copies rows of 8-bit floats, but all copy bytes.
        self._is_fp8 = kv_cache.dtype is torch.float8_e4m3fn
        self._stored = self._runs.view(torch.uint8) if self._is_fp8 else self._runs
        heads = torch.arange(config.num_kv_heads, device=kv_cache.tensor.device)
        self._row_of_head = torch.cat((heads, heads + kv_cache.value_runs))

    @property
    def is_exact(self) -> bool:
        """Whether what is read is what was written, bit for bit."""
        return self._runs.dtype == self._dtype

    @property
    def has_scales(self) -> bool:
        """Whether the cache's elements are int8, with a scale for each token and head."""
        return self._layout.has_scales

    @property
    def runs(self) -> Tensor:
        """The whole cache, a row for each head of a block: [num_blocks * num_runs, ...]."""
        return self._runs

    def slot_rows(self, slots: Tensor) -> Tensor:
        """Where a block's first layer is written. slots: [N] -> [N * 2 * num_kv_heads]."""
        block_ids, offsets = slots // self.block_size, slots % self.block_size
        rows = block_ids[:, None] * self._rows_per_block + self._row_of_head
        return (rows * self.block_size + offsets[:, None]).view(-1)

    def write(self, layer: int, slot_rows: Tensor, kv: Tensor) -> None:
        """kv: [N, 2, num_kv_heads, head_dim].

        int8: the error of an element is at most 1/254 of the largest of its token and head.
        fp8: at most 1/16 of itself, or 2**-10; beyond 448 it is cut off at that.
        """
        tokens = kv.reshape(-1, self.head_dim)
        slot_rows = slot_rows + self.first_slot(layer)
        if not self._layout.has_scales:
            elements = to_e4m3(tokens).view(torch.uint8) if self._is_fp8 else tokens
            slots = self._stored.view(-1, self.head_dim)
            slots.index_copy_(0, slot_rows, elements.to(slots.dtype))
            return
        rows, offsets = slot_rows // self.block_size, slot_rows % self.block_size
        quantised = quantise(tokens.float())
        values, scales = self._parts(self._runs)
        values[rows, offsets] = quantised.values
        scales[rows, offsets] = quantised.scales

    def block_rows(self, block_ids: Tensor) -> Tensor:
        """Where the first layer of these blocks is. block_ids: [n] -> [2 * num_kv_heads * n]."""
        return (block_ids * self._rows_per_block + self._row_of_head[:, None]).view(-1)

    def blocks(self, layer: int) -> Tensor:
        """All blocks' part of a layer in place, if there are no scales.

        [num_blocks, 2, num_kv_heads, block_size, head_dim], strided.
        """
        return self._cache.of_layer(layer)

    def read(self, layer: int, block_rows: Tensor) -> Tensor:
        """A copy: [2, num_kv_heads, n * block_size, head_dim]."""
        runs = self._stored.index_select(0, block_rows + self._cache.first_run(layer))
        if self._is_fp8:
            runs = runs.view(torch.float8_e4m3fn)
        elif self._layout.has_scales:
            values, scales = self._parts(runs)
            runs = values * scales[:, :, None]
        return runs.to(self._dtype).view(2, self._num_kv_heads, -1, self.head_dim)

    def first_slot(self, layer: int) -> int:
        """What a layer adds to the numbers of :meth:`slot_rows`."""
        return self._cache.first_run(layer) * self.block_size

    def _parts(self, runs: Tensor) -> tuple[Tensor, Tensor]:
        """Views of int8 runs: [n, block_size, head_dim] int8, [n, block_size] float32."""
        begin = self._layout.scales_offset
        num_elements = self.block_size * self.head_dim
        values = runs[:, :num_elements].view(-1, self.block_size, self.head_dim)
        return values, runs[:, begin:].view(torch.float32)


def to_e4m3(values: Tensor) -> Tensor:
    """Each rounded to the nearest, cut off at the largest there is; NaN where it is not finite."""
    finite = torch.where(values.isfinite(), values, torch.nan)
    return finite.clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
