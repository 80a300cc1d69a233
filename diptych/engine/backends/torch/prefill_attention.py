"""What a prefill chunk sees, and attention of its many queries in torch's own kernel."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from diptych.engine.backends.torch.kv_access import KVAccess
from diptych.engine.backends.torch.soft_cap import capped_attention
from diptych.engine.inputs import PrefillChunk
from diptych.engine.model.config import ModelConfig
from diptych.engine.model.parts import Rows


class ContextAttention(Protocol):
    """How one chunk's queries attend to its context."""

    def __call__(self, q: Tensor, context: Tensor, view: "ChunkView", out: Tensor) -> None:
        """Fill out.

        q, out: [num_queries, num_heads, head_dim], the view's queries; context:
        [2, num_kv_heads, n, head_dim], keys and values from position view.first to the
        chunk's end.
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
    skipped: int = 0  # of the chunk's first tokens, whose attention nobody asks for
    _places: list[Tensor] = field(default_factory=list)  # the one of places(), if any

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

    def asked(self, rows: Rows) -> "ChunkView | None":
        """From the first of these rows of the flat batch on that is the chunk's; None: no such."""
        begin, end = self.chunk.begin, self.chunk.begin + self.chunk.num_tokens
        own = rows[(rows >= begin) & (rows < end)]
        return replace(self, skipped=int(own.min()) - begin) if len(own) else None

    @property
    def queries(self) -> slice:
        """Rows of the flat batch that attend."""
        return slice(self.chunk.begin + self.skipped, self.chunk.begin + self.chunk.num_tokens)

    @property
    def start(self) -> int:
        """Position of the first query."""
        return self.chunk.start + self.skipped

    def read(self, access: KVAccess, layer: int, kv: Tensor) -> Tensor:
        """The context. kv: [N, 2, num_kv_heads, head_dim], the step's own."""
        if self.block_rows is None:
            own = slice(self.chunk.begin, self.chunk.begin + self.chunk.num_tokens)
            return kv[own].permute(1, 2, 0, 3)
        return access.read(layer, self.block_rows)[:, :, self.context]

    def places(self, blocks: Tensor) -> Tensor:
        """Where the context lies: [num_keys] int64, bytes from the first block on.

        blocks: [num_blocks, 2, num_kv_heads, block_size, head_dim], a layer of the cache;
        the same for all layers.
        """
        if not self._places:
            block_size, (block_stride, *_, token_stride, _) = blocks.shape[3], blocks.stride()
            positions = torch.arange(self.first, self.chunk.end)
            offsets = self.chunk.block_ids[positions // block_size] * block_stride
            offsets += positions % block_size * token_stride
            self._places.append(offsets * blocks.itemsize)
        return self._places[0]


class SDPA:
    """torch's own kernel on blocks of queries, on any device and element type.

    A block is given only keys that one of its queries sees, and has a mask of its own:
    the longer the context, the fewer queries, so that masks stay small.
    """

    _MAX_QUERIES = 256  # of a block; the kernel works on as many at a time
    _MIN_QUERIES = 16
    _MASK_SIZE = 1 << 20  # numbers; more only for the fewest queries

    def __init__(self, config: ModelConfig) -> None:
        self._scale, self._cap = config.attention_scale, config.score_softcap

    def __call__(self, q: Tensor, context: Tensor, view: ChunkView, out: Tensor) -> None:
        num_tokens, head_dim = len(q), q.shape[2]
        num_kv_heads = context.shape[1]
        grouped = (num_tokens, num_kv_heads, -1, head_dim)
        q, out = q.view(grouped).permute(1, 2, 0, 3), out.view(grouped)
        for block in self._blocks(view, num_tokens):
            queries, keys = slice(block.begin, block.end), slice(block.first_key, block.end_key)
            shape = (*q.shape[:2], block.end_key - block.first_key, head_dim)
            attended = self._attend(
                q[:, :, queries],
                context[0, :, None, keys].expand(shape),
                context[1, :, None, keys].expand(shape),
                block.mask(view, q),
            )
            out[queries] = attended.permute(2, 0, 1, 3)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        if self._cap is not None:
            return capped_attention(q, keys, values, mask, self._scale, self._cap)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=self._scale)

    def _blocks(self, view: ChunkView, num_tokens: int) -> Iterator["_Block"]:
        begin = 0
        while begin < num_tokens:
            num_keys = _Block.of(view, begin, begin + self._MAX_QUERIES).num_keys
            fitting = self._MASK_SIZE // num_keys
            size = max(self._MIN_QUERIES, min(self._MAX_QUERIES, fitting))
            end = min(begin + size, num_tokens)
            yield _Block.of(view, begin, end)
            begin = end


class _Block(NamedTuple):
    """Consecutive queries of a chunk, and columns of the context they see."""

    begin: int  # of the queries, in the chunk
    end: int
    first_key: int
    end_key: int

    @classmethod
    def of(cls, view: ChunkView, begin: int, end: int) -> "_Block":
        query = view.start + begin - view.first  # the first one's own column
        first_key = 0 if view.window is None else max(0, query - view.window + 1)
        return cls(begin, end, first_key, query + end - begin)

    @property
    def num_keys(self) -> int:
        return self.end_key - self.first_key

    def mask(self, view: ChunkView, like: Tensor) -> Tensor:
        """[num_queries, num_keys], to be added to scores."""
        keys = torch.arange(self.first_key, self.end_key, device=like.device)
        queries = torch.arange(self.begin, self.end, device=like.device)[:, None]
        queries += view.start - view.first  # columns, as the keys are
        hidden = keys > queries
        if view.window is not None:
            hidden |= keys <= queries - view.window
        mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
        return mask.masked_fill_(hidden, float("-inf"))
