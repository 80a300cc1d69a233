"""Attention of prefill chunks: many queries of one sequence, on gathered context.

Both kinds here give the same result; which one is faster depends on the shape.
Model thread only.
"""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from diptych.engine.inputs import PrefillChunk
from diptych.engine.kv_access import KVAccess
from diptych.engine.model_config import ModelConfig

_FAR = 1 << 40  # tokens


class ChunkAttention(Protocol):
    """How one chunk's queries attend to its context."""

    def __call__(self, q: Tensor, context: Tensor, view: "ChunkView", out: Tensor) -> None:
        """Fill out.

        q, out: [num_tokens, num_heads, head_dim]; context: [2, num_kv_heads, n, head_dim],
        keys and values from position view.first to the chunk's end.
        """
        ...


@dataclass(frozen=True, slots=True)
class ChunkView:
    """What one chunk sees through one window."""

    chunk: PrefillChunk
    window: int | None
    first: int  # position of the first key any of its queries sees
    block_rows: Tensor | None  # None: the chunk's own keys and values are all
    context: slice  # of the gathered slots
    _masks: list[Tensor] = field(default_factory=list)  # the one of mask(), if any

    @classmethod
    def of(cls, chunk: PrefillChunk, window: int | None, access: KVAccess) -> "ChunkView":
        # A lossy cache is read even so: a token sees the same however the prompt is cut.
        if chunk.start == 0 and access.is_exact:
            return cls(chunk, window, 0, None, slice(0))
        first = 0 if window is None else max(0, chunk.start - window + 1)
        first_block = first // access.block_size
        base = first_block * access.block_size
        return cls(
            chunk,
            window,
            first,
            access.block_rows(chunk.block_ids[first_block:]),
            slice(first - base, chunk.end - base),
        )

    def read(self, access: KVAccess, layer: int, kv: Tensor) -> Tensor:
        """The context. kv: [num_tokens, 2, num_kv_heads, head_dim], the chunk's own."""
        if self.block_rows is None:
            return kv.permute(1, 2, 0, 3)
        return access.read(layer, self.block_rows)[:, :, self.context]

    def mask(self, like: Tensor) -> Tensor:
        """[num_tokens, num_keys], to be added to scores; made once for all layers."""
        if not self._masks:
            chunk = self.chunk
            keys = torch.arange(self.first, chunk.end, device=like.device)
            queries = torch.arange(chunk.start, chunk.end, device=like.device)[:, None]
            hidden = keys > queries
            if self.window is not None:
                hidden |= keys <= queries - self.window
            mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
            self._masks.append(mask.masked_fill_(hidden, float("-inf")))
        return self._masks[0]


class SDPA:
    """torch's own kernel on blocks of queries, on any device and element type.

    A block is given only keys that one of its queries sees.
    """

    _BLOCK = 256  # queries; the kernel works on as many at a time

    def __init__(self, config: ModelConfig) -> None:
        self._scale = config.attention_scale

    def __call__(self, q: Tensor, context: Tensor, view: ChunkView, out: Tensor) -> None:
        num_tokens, head_dim = len(q), q.shape[2]
        num_kv_heads = context.shape[1]
        grouped = (num_tokens, num_kv_heads, -1, head_dim)
        q, out = q.view(grouped).permute(1, 2, 0, 3), out.view(grouped)
        for begin in range(0, num_tokens, self._BLOCK):
            block = _Block.of(view, begin, min(begin + self._BLOCK, num_tokens))
            queries, keys = slice(begin, block.end), slice(block.first_key, block.end_key)
            shape = (*q.shape[:2], block.end_key - block.first_key, head_dim)
            attended = F.scaled_dot_product_attention(
                q[:, :, queries],
                context[0, :, None, keys].expand(shape),
                context[1, :, None, keys].expand(shape),
                attn_mask=view.mask(q)[queries, keys],
                scale=self._scale,
            )
            out[queries] = attended.permute(2, 0, 1, 3)


class BlockedAttention:
    """Matrix products on blocks of queries with a compiled softmax between them.

    A block multiplies only with keys that one of its queries sees, and nothing
    masks: hidden weights are set to zero. float32 on the CPU. With heads of 64 the
    softmax costs as much as it saves.
    """

    MIN_HEAD_DIM = 128  # below, SDPA is as fast

    _BLOCK = 128  # queries
    _ROWS_PER_ITEM = 8

    def __init__(self, config: ModelConfig) -> None:
        # Here, because numba is optional and takes a while to import.
        from diptych.engine.kernels.softmax_loop import softmax

        self._softmax = softmax
        self._num_threads = torch.get_num_threads()
        self._scale = torch.tensor([config.attention_scale], dtype=torch.float32)

    def __call__(self, q: Tensor, context: Tensor, view: ChunkView, out: Tensor) -> None:
        num_tokens, head_dim = len(q), q.shape[2]
        num_kv_heads, num_keys = context.shape[1:3]
        grouped = (num_tokens, num_kv_heads, -1, head_dim)
        q, out = q.view(grouped), out.view(grouped)
        group = q.shape[2]
        buffer = q.new_empty(min(self._BLOCK, num_tokens) * group * num_keys)
        for begin in range(0, num_tokens, self._BLOCK):
            block = _Block.of(view, begin, min(begin + self._BLOCK, num_tokens))
            keys = slice(block.first_key, block.end_key)
            num_rows = (block.end - begin) * group
            scores = buffer[: num_rows * (block.end_key - block.first_key)].view(num_rows, -1)
            sums = q.new_empty(num_rows)
            for head in range(num_kv_heads):
                queries = q[begin : block.end, head].reshape(num_rows, head_dim)
                torch.mm(queries, context[0, head, keys].T, out=scores)
                self._softmax(
                    -(-num_rows // self._ROWS_PER_ITEM),
                    self._num_threads,
                    self._ROWS_PER_ITEM,
                    *scores.shape,
                    group,
                    block.sees_from,
                    block.sees_to,
                    scores,
                    self._scale,
                    sums,
                )
                weighted = torch.mm(scores, context[1, head, keys])
                torch.div(
                    weighted.view(-1, group, head_dim),
                    sums.view(-1, group, 1),
                    out=out[begin : block.end, head],
                )


class _Block(NamedTuple):
    """Consecutive queries of a chunk, and columns of the context they see."""

    end: int  # of the queries, in the chunk
    first_key: int
    end_key: int
    sees_from: int  # the first query, counted from first_key; may be negative
    sees_to: int

    @classmethod
    def of(cls, view: ChunkView, begin: int, end: int) -> "_Block":
        query = view.chunk.start + begin - view.first  # the first one's own column
        sees_from = -_FAR if view.window is None else query - view.window + 1
        first_key = max(0, sees_from)
        return cls(
            end, first_key, query + end - begin, sees_from - first_key, query + 1 - first_key
        )
