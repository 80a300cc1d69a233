"""Attention over the paged cache, behind one seam.

A backend writes a layer's new keys and values into their slots and attends from
every row of the flat batch to the sequence it belongs to. Only slots that hold
the sequence's own tokens are ever used: what else lies in a block, or in a padded
table, cannot reach a result. Used by the model thread only.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from diptych.engine.gather_decode import GatherDecode
from diptych.engine.inputs import DecodeBatch, PrefillChunk, StepInputs
from diptych.engine.kv_access import KVAccess
from diptych.engine.kv_cache import KVCache
from diptych.engine.model_config import ModelConfig


class AttentionStep(Protocol):
    """Attention of one step; masks and tables are made once for all layers."""

    def __call__(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """Write kv, then attend.

        q: [N, num_heads, head_dim]; kv: [N, 2, num_kv_heads, head_dim] (keys,
        values) -> [N, num_heads * head_dim].
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
    """Decode rows in one batched kernel, prefill chunks by SDPA on gathered context.

    On the host in float32, decode reads the blocks in place (numba); elsewhere, or
    where numba is not installed, it gathers them.
    """

    def __init__(self, config: ModelConfig, kv_cache: KVCache, *, in_place: bool = True) -> None:
        """in_place: False to gather even where blocks could be read in place."""
        self._config = config
        self._kv_cache = kv_cache
        self._in_place = (
            in_place
            and kv_cache.memory_kind == "DRAM"
            and kv_cache.dtype is torch.float32
            and find_spec("numba") is not None
        )

    def begin_step(self, inputs: StepInputs) -> AttentionStep:
        access = KVAccess(self._config, self._kv_cache)
        decode: DecodeAttention | None = None
        if inputs.decodes is not None and self._in_place:
            decode = _InPlaceDecode(self._config, self._kv_cache, inputs.decodes)
        elif inputs.decodes is not None:
            decode = GatherDecode(self._config, access, inputs.decodes)
        return _Step(self._config, access, inputs, decode)


class _Step:
    def __init__(
        self,
        config: ModelConfig,
        access: KVAccess,
        inputs: StepInputs,
        decode: DecodeAttention | None,
    ) -> None:
        self._config, self._access, self._decode = config, access, decode
        self._slot_rows = access.slot_rows(inputs.slots)
        self._num_decodes = inputs.num_decodes
        self._prefills = {
            window: [_PrefillView.build(chunk, window, access) for chunk in inputs.prefills]
            for window in {layer.sliding_window for layer in config.layers}
        }

    def __call__(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        self._access.write(layer, self._slot_rows, kv)
        views = self._prefills[self._config.layers[layer].sliding_window]
        parts = []
        if self._decode is not None:
            parts.append(self._decode(layer, q[: self._num_decodes]))
        for view in views:
            rows = slice(view.begin, view.begin + view.num_tokens)
            parts.append(self._prefill(layer, q[rows], kv[rows], view))
        output = parts[0] if len(parts) == 1 else torch.cat(parts)
        return output.view(len(q), -1)

    def _prefill(self, layer: int, q: Tensor, kv: Tensor, view: "_PrefillView") -> Tensor:
        num_tokens, num_heads, head_dim = q.shape
        num_kv_heads = self._config.num_kv_heads
        if view.block_rows is None:  # the chunk is the whole context
            context = kv.permute(1, 2, 0, 3)
        else:
            context = self._access.read(layer, view.block_rows)[:, :, view.context]
        group = num_heads // num_kv_heads
        shape = (num_kv_heads, group, context.shape[2], head_dim)
        output = F.scaled_dot_product_attention(
            q.view(num_tokens, num_kv_heads, group, head_dim).permute(1, 2, 0, 3),
            context[0, :, None].expand(shape),
            context[1, :, None].expand(shape),
            attn_mask=view.mask,
            is_causal=view.mask is None,
            scale=self._config.attention_scale,
        )
        return output.permute(2, 0, 1, 3).reshape(q.shape)


class _InPlaceDecode:
    """Hands the rows to the compiled kernel."""

    def __init__(self, config: ModelConfig, kv_cache: KVCache, batch: DecodeBatch) -> None:
        # Here, because numba takes a while to import and not every process decodes.
        from diptych.engine import paged_decode

        self._kernel = paged_decode
        self._config = config
        self._cache = kv_cache.tensor.numpy()
        self._block_tables = batch.block_tables.numpy()
        self._context_lens = batch.context_lens.numpy()
        self._num_threads = torch.get_num_threads()

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        output = torch.empty(q.shape)
        self._kernel.attend(
            q.contiguous().numpy(),
            self._cache,
            layer,
            self._block_tables,
            self._context_lens,
            self._config.layers[layer].sliding_window or self._kernel.NO_WINDOW,
            self._config.attention_scale,
            output.numpy(),
            self._num_threads,
        )
        return output


@dataclass(frozen=True, slots=True)
class _PrefillView:
    """What one chunk sees through one window."""

    begin: int
    num_tokens: int
    block_rows: Tensor | None  # None: the chunk's own keys and values are all
    context: slice  # of the gathered slots
    mask: Tensor | None  # [num_tokens, num_context] added to scores; None: causal

    @classmethod
    def build(cls, chunk: PrefillChunk, window: int | None, access: KVAccess) -> "_PrefillView":
        inside = window is None or chunk.end <= window
        if chunk.start == 0 and inside:
            return cls(chunk.begin, chunk.num_tokens, None, slice(0), None)
        first = 0 if window is None else max(0, chunk.start - window + 1)
        device = chunk.block_ids.device
        keys = torch.arange(first, chunk.end, device=device)
        queries = torch.arange(chunk.start, chunk.end, device=device)[:, None]
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        mask = torch.zeros(hidden.shape, dtype=access.dtype, device=device)
        first_block = first // access.block_size
        base = first_block * access.block_size
        return cls(
            begin=chunk.begin,
            num_tokens=chunk.num_tokens,
            block_rows=access.block_rows(chunk.block_ids[first_block:]),
            context=slice(first - base, chunk.end - base),
            mask=mask.masked_fill_(hidden, float("-inf")),
        )
