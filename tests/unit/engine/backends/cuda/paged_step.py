"""A step on a cache of which all is NaN but what its sequences wrote, and what it has to give."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from diptych.engine.inputs import StepInputs, build_inputs
from diptych.engine.kv.cache import KVCache
from diptych.engine.model.config import ModelConfig
from diptych.engine.scheduling.step import Chunk, StepPlan
from tests.attention_config import SCALE


class Asked(NamedTuple):
    """Rows of one sequence."""

    start: int  # tokens before them, which are in the cache already
    num_tokens: int


@dataclass(frozen=True)
class Case:
    """Tensors of one step, for two layers."""

    config: ModelConfig
    cache: KVCache
    inputs: StepInputs
    tables: list[Tensor]  # of the step's sequences, in the order of its rows
    asked: list[Asked]  # likewise
    q: Tensor  # [N, num_heads, head_dim]
    kv: Tensor  # [N, 2, num_kv_heads, head_dim]

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        asked: Sequence[Asked],
        block_size: int,
        dtype: torch.dtype = torch.float32,
        cache: KVCache | None = None,
    ) -> "Case":
        """cache: to use instead of one that just holds the sequences; all its blocks are."""
        asked = sorted(asked, key=lambda one: one.num_tokens > 1)  # as the rows come
        counts = [-(-sum(one) // block_size) for one in asked]
        if cache is None:
            cache = KVCache(config, sum(counts) + 3, block_size, dtype)
            cache.tensor.fill_(torch.nan)
        order = cache.num_blocks - 1 - torch.randperm(sum(counts), generator=_seeded(7))
        tables = list(torch.split(order, counts))
        for one, table in zip(asked, tables, strict=True):
            _fill(cache, table, one.start)
        chunks = [
            Chunk(
                token_ids=(5,) * one.num_tokens,
                start=one.start,
                block_table=tuple(table.tolist()),
                sample=None,
            )
            for one, table in zip(asked, tables, strict=True)
        ]
        inputs = build_inputs(StepPlan(chunks=tuple(chunks)), block_size)
        num_rows = len(inputs.slots)
        q = torch.randn(num_rows, config.num_heads, config.head_dim, generator=_seeded(1))
        kv = torch.randn(num_rows, 2, config.num_kv_heads, config.head_dim, generator=_seeded(2))
        return cls(config, cache, inputs, tables, asked, q, kv)

    def expected(self, layer: int) -> Tensor:
        """By the definition, in float64, of what the cache holds now."""
        rows: list[Tensor] = []
        window = self.config.layers[layer].sliding_window
        group = self.config.num_heads // self.config.num_kv_heads
        for (start, num_tokens), table in zip(self.asked, self.tables, strict=True):
            context = self.context(layer, table).repeat_interleave(group, 2)
            for position in range(start, start + num_tokens):
                first = 0 if window is None else max(0, position + 1 - window)
                keys, values = context[first : position + 1].unbind(1)
                q = self.q[len(rows)].double()
                scores = torch.einsum("hd,nhd->hn", q, keys) * SCALE
                if self.config.score_softcap is not None:
                    scores = self.config.score_softcap * (scores / self.config.score_softcap).tanh()
                weights = torch.softmax(scores, -1)
                rows.append(torch.einsum("hn,nhd->hd", weights, values))
        return torch.stack(rows)

    def context(self, layer: int, table: Tensor) -> Tensor:
        """[n, 2, num_kv_heads, head_dim] float64, of whole blocks."""
        blocks = self.cache.of_layer(layer)[table]
        return blocks.permute(0, 3, 1, 2, 4).flatten(0, 1).double()


def _fill(cache: KVCache, table: Tensor, num_tokens: int) -> None:
    """Random numbers into the first slots of these blocks, in all layers."""
    generator = _seeded(int(table[0]))
    for index, block_id in enumerate(table.tolist()):
        used = cache.tensor[block_id, ..., : max(0, num_tokens - index * cache.block_size), :]
        used.copy_(torch.randn(used.shape, generator=generator))


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
