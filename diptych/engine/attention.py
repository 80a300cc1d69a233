"""Attention over the paged cache, behind one seam.

A backend writes a layer's new keys and values into their slots and attends from
every row of the flat batch to the sequence it belongs to. Only slots that hold
the sequence's own tokens are ever used: what else lies in a block, or in a padded
table, cannot reach a result. Used by the model thread only.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from diptych.engine.inputs import DecodeBatch, PrefillChunk, StepInputs
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


class TorchAttention:
    """Gathers with index_select, multiplies with bmm and SDPA; runs on any device."""

    def __init__(self, config: ModelConfig, kv_cache: KVCache) -> None:
        self._config = config
        self._kv_cache = kv_cache

    def begin_step(self, inputs: StepInputs) -> AttentionStep:
        return _TorchStep(self._config, KVAccess(self._config, self._kv_cache), inputs)


class KVAccess:
    """Reads and writes a layer's keys and values by flat row numbers.

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


class _TorchStep:
    def __init__(self, config: ModelConfig, access: KVAccess, inputs: StepInputs) -> None:
        self._config, self._access = config, access
        self._slot_rows = access.slot_rows(inputs.slots)
        self._num_decodes = inputs.num_decodes
        windows = {layer.sliding_window for layer in config.layers}
        self._decodes = {
            window: _DecodeView.build(inputs.decodes, window, access)
            for window in windows
            if inputs.decodes is not None
        }
        self._prefills = {
            window: [_PrefillView.build(chunk, window, access) for chunk in inputs.prefills]
            for window in windows
        }

    def __call__(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        self._access.write(layer, self._slot_rows, kv)
        window = self._config.layers[layer].sliding_window
        output = torch.empty_like(q)  # [N, num_heads, head_dim]
        if self._num_decodes:
            output[: self._num_decodes] = self._decode(
                layer, q[: self._num_decodes], self._decodes[window]
            )
        for view in self._prefills[window]:
            rows = slice(view.begin, view.begin + view.num_tokens)
            output[rows] = self._prefill(layer, q[rows], kv[rows], view)
        return output.view(len(q), -1)

    def _decode(self, layer: int, q: Tensor, view: "_DecodeView") -> Tensor:
        num_rows, num_heads, head_dim = q.shape
        num_kv_heads = self._config.num_kv_heads
        context = self._access.read(layer, view.block_rows)
        context = context.view(2, num_kv_heads, num_rows, -1, head_dim)
        keys, values = context[0].flatten(0, 1), context[1]
        # A zero weight times a NaN is a NaN: what does not belong to the row is cleared.
        values = values.masked_fill_(view.hidden[None, :, :, None], 0).flatten(0, 1)
        grouped = q.view(num_rows, num_kv_heads, -1, head_dim).transpose(0, 1)
        scores = torch.bmm(grouped.reshape(len(keys), -1, head_dim), keys.transpose(1, 2))
        scores = scores.float().mul_(self._config.attention_scale)
        scores = scores.view(num_kv_heads, num_rows, num_heads // num_kv_heads, -1)
        scores.masked_fill_(view.hidden[None, :, None, :], float("-inf"))
        weights = torch.softmax(scores, -1).to(q.dtype).flatten(0, 1)
        output = torch.bmm(weights, values)  # [num_kv_heads * num_rows, group, head_dim]
        output = output.view(num_kv_heads, num_rows, -1, head_dim)
        return output.transpose(0, 1).reshape(q.shape)

    def _prefill(self, layer: int, q: Tensor, kv: Tensor, view: "_PrefillView") -> Tensor:
        num_tokens, _, head_dim = q.shape
        num_kv_heads = self._config.num_kv_heads
        if view.block_rows is None:  # the chunk is the whole context
            context = kv.permute(1, 2, 0, 3)
        else:
            context = self._access.read(layer, view.block_rows)[:, :, view.context]
        group = q.shape[1] // num_kv_heads
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


@dataclass(frozen=True, slots=True)
class _DecodeView:
    """What the decode rows see through one window: whole blocks and what to hide in them."""

    block_rows: Tensor
    hidden: Tensor  # [num_rows, num_slots] bool

    @classmethod
    def build(
        cls, batch: DecodeBatch | None, window: int | None, access: KVAccess
    ) -> "_DecodeView":
        assert batch is not None
        size = access.block_size
        ends = batch.context_lens[:, None]
        begins = torch.zeros_like(ends) if window is None else (ends - window).clamp_(min=0)
        num_columns = batch.block_tables.shape[1]
        if window is not None:
            num_columns = min(num_columns, -(-(window - 1) // size) + 1)
        device = ends.device
        columns = begins // size + torch.arange(num_columns, device=device)
        positions = (columns * size)[:, :, None] + torch.arange(size, device=device)
        positions = positions.flatten(1)
        columns = columns.clamp_(max=batch.block_tables.shape[1] - 1)
        block_ids = batch.block_tables.gather(1, columns)
        return cls(
            block_rows=access.block_rows(block_ids.flatten()),
            hidden=(positions < begins) | (positions >= ends),
        )


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
