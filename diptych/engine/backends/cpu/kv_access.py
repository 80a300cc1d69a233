"""Reads and writes one layer's keys and values in the paged cache, by row numbers.

Knows the layout's arithmetic, not which blocks belong to whom. Model thread only.
"""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from diptych.engine.backends.cpu.int8_linear import quantise
from diptych.engine.kv.cache import KVCache
from diptych.engine.model.config import ModelConfig

if TYPE_CHECKING:
    from diptych.engine.backends.cpu.kernels.loop import Call

_SERIAL_SIZE = 1 << 15  # numbers; below, starting threads costs more than they do


class KVAccess:
    """Copies of a layer's keys and values, in and out, as the model's element type.

    A row of the cache is one run: one head of one block. index_select and index_copy_
    on whole rows run near memory speed; indexing with several tensors does not.
    """

    def __init__(self, config: ModelConfig, kv_cache: KVCache, dtype: torch.dtype) -> None:
        """dtype: the model's, of what is written and read; the cache may have another."""
        self.block_size = kv_cache.block_size
        self._dtype = dtype
        self._layout = kv_cache.layout
        self._head_dim = config.head_dim
        self._rows_per_layer = 2 * config.num_kv_heads
        self._rows_per_block = self._layout.num_runs
        self._runs = kv_cache.tensor.view(kv_cache.num_blocks * self._rows_per_block, -1)
        self._row_of_head = torch.arange(self._rows_per_layer, device=kv_cache.tensor.device)
        on_host = kv_cache.tensor.device.type == "cpu"
        self._write_slots = _slot_writer() if on_host and self._is_float32 else None
        self._write_int8 = _int8_writer() if on_host and self._layout.has_scales else None

    @property
    def is_exact(self) -> bool:
        """Whether what is read is what was written, bit for bit."""
        return self._runs.dtype == self._dtype

    @property
    def _is_float32(self) -> bool:
        return self._dtype is torch.float32 and self.is_exact

    @property
    def has_loops(self) -> bool:
        """Whether compiled loops write this cache."""
        return self._write_slots is not None or self._write_int8 is not None

    def slot_rows(self, slots: Tensor) -> Tensor:
        """Where layer 0 of these slots goes. slots: [N] -> [N * 2 * num_kv_heads]."""
        block_ids, offsets = slots // self.block_size, slots % self.block_size
        rows = block_ids[:, None] * self._rows_per_block + self._row_of_head
        return (rows * self.block_size + offsets[:, None]).view(-1)

    def write(self, layer: int, slot_rows: Tensor, kv: Tensor) -> None:
        """kv: [N, 2, num_kv_heads, head_dim].

        int8: the error of an element is at most 1/254 of the largest of its token and head.
        """
        if self.has_loops:
            num_threads = 1 if kv.numel() < _SERIAL_SIZE else torch.get_num_threads()
            self.write_call(layer, slot_rows, kv).run(num_threads)
            return
        tokens = kv.reshape(-1, self._head_dim)
        slot_rows = slot_rows + self._first_slot(layer)
        if not self._layout.has_scales:
            slots = self._runs.view(-1, self._head_dim)
            slots.index_copy_(0, slot_rows, tokens.to(slots.dtype))
            return
        rows, offsets = slot_rows // self.block_size, slot_rows % self.block_size
        quantised = quantise(tokens.float())
        values, scales = self._parts(self._runs)
        values[rows, offsets] = quantised.values
        scales[rows, offsets] = quantised.scales

    def write_call(self, layer: int, slot_rows: Tensor, kv: Tensor) -> "Call":
        """As ``write``, to be run later. Where there are loops only."""
        first = self._first_slot(layer)
        if self._write_slots is not None:
            tokens = kv.reshape(-1, self._head_dim).contiguous()
            return self._write_slots(tokens, slot_rows, first, self._runs)
        assert self._write_int8 is not None
        tokens = kv.reshape(-1, self._head_dim).float().contiguous()
        return self._write_int8(tokens, slot_rows, first, self._runs, self.block_size)

    def block_rows(self, block_ids: Tensor) -> Tensor:
        """Where layer 0 of these blocks is. block_ids: [n] -> [2 * num_kv_heads * n]."""
        return (block_ids * self._rows_per_block + self._row_of_head[:, None]).view(-1)

    def blocks(self, layer: int) -> Tensor:
        """All blocks' part of a layer in place, if there are no scales.

        [num_blocks, 2, num_kv_heads, block_size, head_dim], strided.
        """
        num_layers = self._rows_per_block // self._rows_per_layer
        num_kv_heads = self._rows_per_layer // 2
        shape = (num_layers, 2, num_kv_heads, self.block_size, self._head_dim)
        return self._runs.view(-1, *shape)[:, layer]

    def read(self, layer: int, block_rows: Tensor) -> Tensor:
        """A copy: [2, num_kv_heads, n * block_size, head_dim]."""
        runs = self._runs.index_select(0, block_rows + layer * self._rows_per_layer)
        if self._layout.has_scales:
            values, scales = self._parts(runs)
            runs = values * scales[:, :, None]
        return runs.to(self._dtype).view(2, self._rows_per_layer // 2, -1, self._head_dim)

    def _first_slot(self, layer: int) -> int:
        return layer * self._rows_per_layer * self.block_size

    def _parts(self, runs: Tensor) -> tuple[Tensor, Tensor]:
        """Views of int8 runs: [n, block_size, head_dim] int8, [n, block_size] float32."""
        begin = self._layout.scales_offset
        num_elements = self.block_size * self._head_dim
        values = runs[:, :num_elements].view(-1, self.block_size, self._head_dim)
        return values, runs[:, begin:].view(torch.float32)


@cache
def _slot_writer() -> "Callable[[Tensor, Tensor, int, Tensor], Call] | None":
    """The compiled writer of float32 rows, where there is a compiler."""
    if find_spec("numba") is None:
        return None
    # Here, because numba is optional and takes a while to import.
    from diptych.engine.backends.cpu.kernels.slot_loop import write_slots

    return write_slots


@cache
def _int8_writer() -> "Callable[[Tensor, Tensor, int, Tensor, int], Call] | None":
    """The compiled writer of int8 rows and their scales, where there is a compiler."""
    if find_spec("numba") is None:
        return None
    from diptych.engine.backends.cpu.kernels.int8_slot_loop import write_int8_slots

    return write_int8_slots
