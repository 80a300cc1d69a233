"""Attention over the paged cache of host memory, in compiled loops where they work.

They read the blocks in place: decode always, prefill of a float32 model from a float32
cache. Prefill from another cache has its context gathered. Capped scores are torch's, and so
are caches of fp8.
"""

import torch
from torch import Tensor

from diptych.engine.backends.cpu import paged_decode
from diptych.engine.backends.cpu.kv_writer import KVWriter
from diptych.engine.backends.cpu.prefill_attention import TiledAttention
from diptych.engine.backends.torch.attention import (
    ChunkAttention,
    DecodeAttention,
    GatheredChunks,
    PagedStep,
    WriteKV,
)
from diptych.engine.backends.torch.gather_decode import GatherDecode
from diptych.engine.backends.torch.kv_access import KVAccess
from diptych.engine.backends.torch.prefill_attention import SDPA, ChunkView
from diptych.engine.inputs import DecodeBatch, StepInputs
from diptych.engine.kv.cache import KVCache
from diptych.engine.model.config import ModelConfig
from diptych.engine.model.parts import AttentionStep


class CompiledAttention:
    """Implements ``Attention``. Importing it needs numba and compiles, or finds, the loops."""

    def __init__(self, config: ModelConfig, kv_cache: KVCache, dtype: torch.dtype) -> None:
        """dtype: the model's; the cache may have another."""
        self._config, self._kv_cache = config, kv_cache
        self._access = access = KVAccess(config, kv_cache, dtype)
        self._write: WriteKV = KVWriter.of(access) or access.write
        self._chunks = _chunk_attention(config, access, dtype)

    def begin_step(self, inputs: StepInputs) -> AttentionStep:
        decode = None if inputs.decodes is None else self._decode(inputs.decodes)
        return PagedStep(self._config, self._access, inputs, self._write, decode, self._chunks)

    def _decode(self, batch: DecodeBatch) -> DecodeAttention:
        if paged_decode.supports(self._config, self._kv_cache.dtype):
            return paged_decode.PagedDecode(self._config, self._kv_cache, batch)
        return GatherDecode(self._config, self._access, batch)


def _chunk_attention(config: ModelConfig, access: KVAccess, dtype: torch.dtype) -> ChunkAttention:
    is_capped = config.score_softcap is not None  # which the kernel does not do
    if dtype is not torch.float32 or is_capped or not TiledAttention.supports(config):
        return GatheredChunks(access, SDPA(config))
    tiled = TiledAttention(config)
    return _ChunksInPlace(access, tiled) if access.is_exact else GatheredChunks(access, tiled)


class _ChunksInPlace:
    """Attention of chunks to blocks of float32 where they lie."""

    def __init__(self, access: KVAccess, attention: TiledAttention) -> None:
        self._access, self._attention = access, attention

    def __call__(self, layer: int, q: Tensor, kv: Tensor, view: ChunkView, out: Tensor) -> None:
        self._attention.on_blocks(q, self._access.blocks(layer), view, out)
