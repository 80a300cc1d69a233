"""Decode attention that reads the KV blocks where they lie, in compiled loops.

Gathering a batch's context costs several times what the arithmetic does. Host
memory only, every element type of the cache but fp8. The first import compiles (seconds;
later processes find it in numba's cache), so warm up first.
"""

import torch
from torch import Tensor

from diptych.engine.backends.cpu.kernels import paged_loops
from diptych.engine.backends.cpu.kernels.loop import Call
from diptych.engine.backends.cpu.kernels.paged_loops import PIECE_TOKENS, STATE_FLOATS
from diptych.engine.inputs import DecodeBatch
from diptych.engine.kv.cache import KVCache
from diptych.engine.model.config import ModelConfig

_KINDS = {
    torch.float32: paged_loops.FLOAT32,
    torch.bfloat16: paged_loops.BFLOAT16,
    torch.int8: paged_loops.INT8,
}
_NO_WINDOW = 1 << 62
_BYTES_AHEAD = 8192  # how much later what is fetched is used, at least


def supports(config: ModelConfig, dtype: torch.dtype) -> bool:
    """Whether the compiled loops take a cache of these elements, heads of this size, and its
    scores, which they do not cap.
    """
    is_plain = config.head_dim % paged_loops.LANES == 0 and config.score_softcap is None
    return is_plain and dtype in _KINDS


class PagedDecode:
    """Attention of one step's decode rows, one token each, over all layers.

    A row's result has the same bits whatever the other rows are. Model thread only.
    """

    def __init__(self, config: ModelConfig, kv_cache: KVCache, batch: DecodeBatch) -> None:
        """The model must be one that is supported."""
        self._config, self._kv_cache = config, kv_cache
        self._pool = kv_cache.tensor
        self._block_tables = batch.block_tables.contiguous()
        self._context_lens = batch.context_lens.contiguous()
        self._longest = int(batch.context_lens.max())
        self._scale = torch.tensor([config.attention_scale], dtype=torch.float32)
        layout = kv_cache.layout
        self._layout = (
            _KINDS[layout.dtype],
            layout.dtype.itemsize,
            layout.block_size,
            layout.run_bytes,
            layout.scales_offset,
        )
        self._runs_per_block = layout.num_runs
        self._runs_ahead = -(-_BYTES_AHEAD // layout.run_bytes)
        num_rows, num_heads = len(self._context_lens), config.num_heads
        # Of each row and head, max_pieces times head_dim sums and their state.
        self._pieces = torch.empty(
            num_rows * num_heads * self._max_pieces(None) * (config.head_dim + STATE_FLOATS)
        )
        self._num_done = torch.zeros(num_rows * config.num_kv_heads, dtype=torch.int64)

    def __call__(self, layer: int, q: Tensor, out: Tensor) -> None:
        """q, out: [num_rows, num_heads, head_dim], of one element type."""
        queries = q.float().contiguous()
        result = out if out.dtype is torch.float32 else torch.empty_like(queries)
        self.call(layer, queries, result).run(torch.get_num_threads())
        if result is not out:
            out.copy_(result)

    def call(self, layer: int, queries: Tensor, out: Tensor) -> Call:
        """What attends in one layer. queries, out: [num_rows, num_heads, head_dim] float32.

        In another step it has other :meth:`step_words`, and else the same.
        """
        config = self._config
        window = config.layers[layer].sliding_window
        return paged_loops.attend.call(
            *self.step_words(window),
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            *self._layout,
            self._runs_per_block,
            self._kv_cache.first_run(layer),
            self._kv_cache.value_runs,
            self._runs_ahead,
            window or _NO_WINDOW,
            queries,
            self._pool,
            self._scale,
            out,
        )

    def step_words(self, window: int | None) -> list[int]:
        """Number of items, and the arguments that are this step's: the first ones."""
        max_pieces = self._max_pieces(window)
        return [
            len(self._context_lens) * self._config.num_kv_heads * max_pieces,
            self._block_tables.shape[1],
            max_pieces,
            self._block_tables.data_ptr(),
            self._context_lens.data_ptr(),
            self._pieces.data_ptr(),
            self._num_done.data_ptr(),
        ]

    def _max_pieces(self, window: int | None) -> int:
        """Of any row."""
        longest = self._longest if window is None else min(self._longest, window)
        return -(-longest // PIECE_TOKENS)
