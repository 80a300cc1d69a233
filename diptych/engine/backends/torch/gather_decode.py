"""Decode attention on gathered copies of the blocks: any device, any element type."""

from dataclasses import dataclass

import torch
from torch import Tensor

from diptych.engine.backends.torch.kv_access import KVAccess
from diptych.engine.backends.torch.soft_cap import cap_scores
from diptych.engine.inputs import DecodeBatch
from diptych.engine.model.config import ModelConfig


class GatherDecode:
    """Copies the rows' blocks, padded to the longest, and multiplies with bmm."""

    def __init__(self, config: ModelConfig, access: KVAccess, batch: DecodeBatch) -> None:
        self._config, self._access = config, access
        self._views = {
            window: _DecodeView.build(batch, window, access)
            for window in {layer.sliding_window for layer in config.layers}
        }

    def __call__(self, layer: int, q: Tensor, out: Tensor) -> None:
        """q, out: [num_rows, num_heads, head_dim]."""
        num_rows, num_heads, head_dim = q.shape
        num_kv_heads = self._config.num_kv_heads
        view = self._views[self._config.layers[layer].sliding_window]
        context = self._access.read(layer, view.block_rows)
        context = context.view(2, num_kv_heads, num_rows, -1, head_dim)
        keys, values = context[0].flatten(0, 1), context[1]
        # A zero weight times a NaN is a NaN: what does not belong to the row is cleared.
        values = values.masked_fill_(view.hidden[None, :, :, None], 0).flatten(0, 1)
        grouped = q.view(num_rows, num_kv_heads, -1, head_dim).transpose(0, 1)
        # Scores are never rounded to less than float32: large ones would lose whole units.
        queries = grouped.reshape(len(keys), -1, head_dim).float()
        scores = torch.bmm(queries, keys.float().transpose(1, 2))
        scores = scores.mul_(self._config.attention_scale)
        if self._config.score_softcap is not None:
            cap_scores(scores, self._config.score_softcap)
        scores = scores.view(num_kv_heads, num_rows, num_heads // num_kv_heads, -1)
        scores.masked_fill_(view.hidden[None, :, None, :], float("-inf"))
        weights = torch.softmax(scores, -1).to(q.dtype).flatten(0, 1)
        output = torch.bmm(weights, values)  # [num_kv_heads * num_rows, group, head_dim]
        output = output.view(num_kv_heads, num_rows, -1, head_dim)
        out.view(num_rows, num_kv_heads, -1, head_dim).copy_(output.transpose(0, 1))


@dataclass(frozen=True, slots=True)
class _DecodeView:
    """What the decode rows see through one window: whole blocks and what to hide in them."""

    block_rows: Tensor
    hidden: Tensor  # [num_rows, num_slots] bool

    @classmethod
    def build(cls, batch: DecodeBatch, window: int | None, access: KVAccess) -> "_DecodeView":
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
