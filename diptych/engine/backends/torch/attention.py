"""Attention over the paged cache in torch's operators; and the order of a step, for any kernels.

Decode rows go through one batched kernel, prefill chunks one by one.
"""

from typing import Protocol

import torch
from torch import Tensor

from diptych.engine.backends.torch.gather_decode import GatherDecode
from diptych.engine.backends.torch.kv_access import KVAccess
from diptych.engine.backends.torch.prefill_attention import SDPA, ChunkView, ContextAttention
from diptych.engine.inputs import StepInputs
from diptych.engine.kv.cache import KVCache
from diptych.engine.model.config import ModelConfig
from diptych.engine.model.parts import AttentionStep, Rows


class WriteKV(Protocol):
    """Puts a layer's new keys and values into the cache."""

    def __call__(self, layer: int, slot_rows: Tensor, kv: Tensor) -> None:
        """As :meth:`KVAccess.write`."""
        ...


class DecodeAttention(Protocol):
    """The part of a step that decides decode speed: one token per row."""

    def __call__(self, layer: int, q: Tensor, out: Tensor) -> None:
        """q, out: [num_rows, num_heads, head_dim]."""
        ...


class ChunkAttention(Protocol):
    """Attention of one prefill chunk to what lies in the cache."""

    def __call__(self, layer: int, q: Tensor, kv: Tensor, view: ChunkView, out: Tensor) -> None:
        """q, out: [num_queries, num_heads, head_dim]; kv: the whole step's own."""
        ...


class TorchAttention:
    """Everything on gathered copies of the blocks: any device, any element type."""

    def __init__(self, config: ModelConfig, kv_cache: KVCache, dtype: torch.dtype) -> None:
        """dtype: the model's; the cache may have another."""
        self._config = config
        self._access = KVAccess(config, kv_cache, dtype)
        self._chunks = GatheredChunks(self._access, SDPA(config))

    def begin_step(self, inputs: StepInputs) -> AttentionStep:
        batch = inputs.decodes
        decode = None if batch is None else GatherDecode(self._config, self._access, batch)
        access = self._access
        return PagedStep(self._config, access, inputs, access.write, decode, self._chunks)


class GatheredChunks:
    """Attention of chunks on copies of their context."""

    def __init__(self, access: KVAccess, attention: ContextAttention) -> None:
        self._access, self._attention = access, attention

    def __call__(self, layer: int, q: Tensor, kv: Tensor, view: ChunkView, out: Tensor) -> None:
        self._attention(q, view.read(self._access, layer, kv), view, out)


class PagedStep:
    """One step: writes first, then decode rows and chunks, each by the kernels it is given."""

    def __init__(
        self,
        config: ModelConfig,
        access: KVAccess,
        inputs: StepInputs,
        write: WriteKV,
        decode: DecodeAttention | None,
        chunks: ChunkAttention,
    ) -> None:
        """decode: None where the step has no such rows."""
        self._config, self._write, self._decode, self._chunks = config, write, decode, chunks
        self._slot_rows = access.slot_rows(inputs.slots)
        self._num_decodes = inputs.num_decodes
        self._views = {
            window: [ChunkView.of(chunk, window, access) for chunk in inputs.prefills]
            for window in {layer.sliding_window for layer in config.layers}
        }

    def __call__(
        self, layer: int, q: Tensor, kv: Tensor, out: Tensor, rows: Rows | None = None
    ) -> None:
        self._write(layer, self._slot_rows, kv)
        if self._decode is not None:
            self._decode(layer, q[: self._num_decodes], out[: self._num_decodes])
        for whole in self._views[self._config.layers[layer].sliding_window]:
            view = whole if rows is None else whole.asked(rows)
            if view is not None:
                self._chunks(layer, q[view.queries], kv, view, out[view.queries])
