"""What kernels are told of a layer: where its keys and values lie in a cache."""

from typing import NamedTuple

import torch
from torch import Tensor

from diptych.engine.kv.cache import KVCache


class LayerPlace(NamedTuple):
    """Made for each launch; views of the cache. Strides in elements."""

    blocks: Tensor  # [num_blocks, 2, num_kv_heads] runs
    scales: Tensor | None  # from the first run's on
    strides: tuple[int, int, int]  # of blocks, from keys to values, of heads

    @classmethod
    def of(cls, kv_cache: KVCache, layer: int) -> "LayerPlace":
        blocks, layout = kv_cache.of_layer(layer), kv_cache.layout
        scales = None
        if layout.has_scales:
            scales = blocks[..., layout.scales_offset :].view(torch.float32)
        elif layout.dtype is torch.float8_e4m3fn:
            blocks = blocks.view(torch.uint8)
        block_stride, value_stride, head_stride, *_ = blocks.stride()
        return cls(blocks, scales, (block_stride, value_stride, head_stride))
