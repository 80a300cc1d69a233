"""Attention over the paged cache, behind one seam.

A backend writes a layer's new keys and values into their slots and attends from
every row of the flat batch to the sequence it belongs to. Only slots that hold
the sequence's own tokens are ever used: what else lies in a block, or in a padded
table, cannot reach a result. Used by the model thread only.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from diptych.engine.backends.cpu.kv_access import KVAccess
from diptych.engine.backends.cpu.prefill_attention import (
    SDPA,
    ChunkAttention,
    ChunkView,
    TiledAttention,
)
from diptych.engine.backends.torch.gather_decode import GatherDecode
from diptych.engine.inputs import StepInputs
from diptych.engine.kv.cache import KVCache
from diptych.engine.model.config import ModelConfig

if TYPE_CHECKING:
    from diptych.engine.backends.cpu.paged_decode import PagedDecode


class AttentionStep(Protocol):
    """Attention of one step; masks and tables are made once for all layers."""

    def __call__(self, layer: int, q: Tensor, kv: Tensor, rows: Tensor | None = None) -> Tensor:
        """Write kv, then attend.

        q: [N, num_heads, head_dim]; kv: [N, 2, num_kv_heads, head_dim] (keys,
        values) -> [N, num_heads * head_dim]. rows: [R] int64, the only ones that are
        wanted; the others may hold anything.
        """
        ...


class AttentionBackend(Protocol):
    """Attention on one KV cache."""

    def begin_step(self, inputs: StepInputs) -> AttentionStep: ...


class DecodeAttention(Protocol):
    """The part of a step that decides decode speed: one token per row."""

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        """q: [num_rows, num_heads, head_dim] -> the same shape."""
        ...


class PagedAttention:
    """Decode rows in one batched kernel, prefill chunks one by one.

    On the host, compiled kernels (numba) read the blocks in place: decode always, prefill
    of a float32 model from a float32 cache. Prefill from another cache has its context
    gathered; elsewhere, or without numba, both are torch's on gathered context.
    """

    def __init__(
        self,
        config: ModelConfig,
        kv_cache: KVCache,
        dtype: torch.dtype = torch.float32,
        *,
        compiled: bool = True,
    ) -> None:
        """dtype: the model's; compiled: False to do without compiled loops where they work."""
        self._config = config
        self._kv_cache = kv_cache
        self._dtype = dtype
        compiled = compiled and kv_cache.memory_kind == "DRAM" and find_spec("numba") is not None
        self._paged_decode: type[PagedDecode] | None = None
        if compiled:
            # Here, because numba is optional and takes a while to import.
            from diptych.engine.backends.cpu import paged_decode

            if paged_decode.supports(config):
                self._paged_decode = paged_decode.PagedDecode
        tiled = compiled and dtype is torch.float32 and TiledAttention.supports(config)
        self._prefill: ChunkAttention = (TiledAttention if tiled else SDPA)(config)

    def begin_step(self, inputs: StepInputs) -> AttentionStep:
        access = KVAccess(self._config, self._kv_cache, self._dtype)
        decode: DecodeAttention | None = None
        if inputs.decodes is not None and self._paged_decode is not None:
            decode = self._paged_decode(self._config, self._kv_cache, inputs.decodes)
        elif inputs.decodes is not None:
            decode = GatherDecode(self._config, access, inputs.decodes)
        return _Step(self._config, access, inputs, decode, self._prefill)


class _Step:
    def __init__(
        self,
        config: ModelConfig,
        access: KVAccess,
        inputs: StepInputs,
        decode: DecodeAttention | None,
        prefill: ChunkAttention,
    ) -> None:
        self._config, self._access = config, access
        self._decode, self._prefill = decode, prefill
        self._slot_rows = access.slot_rows(inputs.slots)
        self._num_decodes = inputs.num_decodes
        self._prefill_blocks = None
        if isinstance(prefill, TiledAttention) and access.is_exact:
            self._prefill_blocks = prefill.on_blocks
        self._views = {
            window: [ChunkView.of(chunk, window, access) for chunk in inputs.prefills]
            for window in {layer.sliding_window for layer in config.layers}
        }

    def __call__(self, layer: int, q: Tensor, kv: Tensor, rows: Tensor | None = None) -> Tensor:
        self._access.write(layer, self._slot_rows, kv)
        decoded = None if self._decode is None else self._decode(layer, q[: self._num_decodes])
        views = self._views[self._config.layers[layer].sliding_window]
        if rows is not None:
            views = [part for view in views if (part := view.asked(rows)) is not None]
        if decoded is not None and len(decoded) == len(q):
            return decoded.view(len(q), -1)
        output = torch.empty_like(q)
        if decoded is not None:
            output[: self._num_decodes] = decoded
        for view in views:
            queries = view.queries
            if self._prefill_blocks is not None:
                blocks = self._access.blocks(layer)
                self._prefill_blocks(q[queries], blocks, view, output[queries])
                continue
            context = view.read(self._access, layer, kv)
            self._prefill(q[queries], context, view, output[queries])
        return output.view(len(q), -1)
