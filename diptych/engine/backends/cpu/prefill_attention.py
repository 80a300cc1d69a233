"""Attention of prefill chunks in a compiled kernel. float32 on the CPU; model thread only."""

import math

import torch
from torch import Tensor

from diptych.engine.backends.cpu.kernels import prefill_loop
from diptych.engine.backends.cpu.kernels.loop import has_team
from diptych.engine.backends.cpu.kernels.processor import LANES
from diptych.engine.backends.torch.prefill_attention import ChunkView
from diptych.engine.model.config import ModelConfig

_FAR = 1 << 40  # tokens; a window that ends nowhere


class TiledAttention:
    """A compiled kernel that never writes the scores to memory. float32 on the CPU.

    A token's result has the same bits however its prompt is cut into chunks.
    """

    def __init__(self, config: ModelConfig) -> None:
        """The first one on a machine compiles (seconds). The model must be supported."""
        self._num_threads = torch.get_num_threads()
        self._scale = torch.tensor([config.attention_scale * math.log2(math.e)])
        self._scratch_bytes = prefill_loop.scratch_bytes(config.head_dim)
        self._scratches = torch.empty(self._num_threads, self._scratch_bytes, dtype=torch.uint8)
        self._num_taken = torch.zeros(1, dtype=torch.int64)

    @staticmethod
    def supports(config: ModelConfig) -> bool:
        """Whether the kernel takes heads of this size, and has threads to run on."""
        return config.head_dim % LANES == 0 and (torch.get_num_threads() == 1 or has_team())

    def __call__(self, q: Tensor, context: Tensor, view: ChunkView, out: Tensor) -> None:
        places = torch.arange(context.shape[2]).mul_(4 * context.stride(2))
        self._run(q, context[0], context[1], places, view, out)

    def on_blocks(self, q: Tensor, blocks: Tensor, view: ChunkView, out: Tensor) -> None:
        """As a call, on a float32 cache itself; blocks as in :meth:`ChunkView.places`."""
        keys, values = (blocks[:, i].transpose(0, 1) for i in range(2))
        self._run(q, keys, values, view.places(blocks), view, out)

    def _run(
        self, q: Tensor, keys: Tensor, values: Tensor, places: Tensor, view: ChunkView, out: Tensor
    ) -> None:
        """keys, values: the first dimension is [num_kv_heads]; each lies where places tell."""
        num_tokens, num_heads, head_dim = q.shape
        num_kv_heads = len(keys)
        num_tiles = -(-num_tokens * (num_heads // num_kv_heads) // prefill_loop.TILE_ROWS)
        prefill_loop.attend(
            num_kv_heads * num_tiles,
            self._num_threads,
            num_tokens,
            num_heads,
            num_kv_heads,
            head_dim,
            view.start,
            view.first,
            view.window or _FAR,
            q,
            out,
            self._scale,
            keys.data_ptr(),
            values.data_ptr(),
            4 * keys.stride(0),
            places,
            self._scratches,
            self._scratch_bytes,
            self._num_taken.zero_(),
        )
