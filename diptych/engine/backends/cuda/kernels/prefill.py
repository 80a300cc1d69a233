"""Attention of prompts' chunks to blocks where they lie, many chunks in one launch.

Chunks are cut into tiles of queries; a program attends with one tile and one head, over the
keys that any of its queries sees, and keeps running sums (FlashAttention-2, Dao 2023).
"""

import triton
import triton.language as tl

from diptych.engine.backends.cuda.kernels import score_forms, slots

NUM_FIELDS = tl.constexpr(4)  # of a tile


@triton.jit  # type: ignore[untyped-decorator]
def attend_tiles(
    q: tl.tensor,  # [N, num_heads, head_dim]
    layer: tl.tensor,  # [num_blocks, 2, num_kv_heads] runs, strided
    scales: tl.tensor,  # where its runs have scales: at the first one's; else None
    tiles: tl.tensor,  # [num_tiles, 4] int64: first row, rows, first position, place in block_ids
    block_ids: tl.tensor,  # [...] int64, the chunks' tables one after the other
    sinks: tl.tensor,  # [num_heads] float32, scores of no token; None: none
    out: tl.tensor,  # [N, num_heads, head_dim]
    block_stride: int,
    value_stride: int,
    head_stride: int,
    scale: float,  # of scores, with the logarithm of e to base 2
    group: tl.constexpr,  # query heads of a key-value head
    head_dim: tl.constexpr,
    head_width: tl.constexpr,  # a power of two
    block_size: tl.constexpr,
    window: tl.constexpr,  # tokens; 0: none
    softcap: tl.constexpr,  # of scores, to base e; None: none
    tile_queries: tl.constexpr,
    tile_keys: tl.constexpr,
) -> None:
    """Launched over (tiles, heads)."""
    tile, head, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    described = tiles + tile * NUM_FIELDS
    first_row = tl.load(described)
    num_rows = tl.load(described + 1).to(tl.int32)
    position = tl.load(described + 2).to(tl.int32)
    table = block_ids + tl.load(described + 3)
    begin = tl.maximum(position - window + 1, 0) if window else 0
    end = position + num_rows

    members, dims = tl.arange(0, tile_queries), tl.arange(0, head_width)
    is_element = (members < num_rows)[:, None] & (dims < head_dim)[None, :]
    rows = ((first_row + members) * num_heads + head)[:, None] * head_dim + dims[None, :]
    queries = tl.load(q + rows, mask=is_element, other=0.0)
    positions = position + members

    peak = tl.full([tile_queries], 0.0 if sinks is not None else float("-inf"), tl.float32)
    total = tl.zeros([tile_queries], tl.float32)
    sums = tl.zeros([tile_queries, head_width], tl.float32)
    if sinks is not None:
        peak += score_forms.to_base_2(tl.load(sinks + head))
        total += 1.0
    for token in range(begin, end, tile_keys):
        tokens = token + tl.arange(0, tile_keys)
        is_own = tokens < end
        ids = tl.load(table + tokens // block_size, mask=is_own, other=0)
        # In 64 bits: a pool has more elements than 32 can count.
        runs = ids.to(tl.int64) * block_stride + (head // group) * head_stride
        within = tokens % block_size
        k = slots.read(layer, scales, runs, within, is_own, head_dim, head_width, queries.dtype)
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale
        if softcap is not None:
            scores = score_forms.capped(scores, softcap)
        is_seen = is_own[None, :] & (tokens[None, :] <= positions[:, None])
        if window:
            is_seen = is_seen & (tokens[None, :] > positions[:, None] - window)
        scores = tl.where(is_seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # A query's window may begin behind this tile: nothing seen yet, and no weight.
        level = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights, shrink = tl.exp2(scores - level[:, None]), tl.exp2(peak - level)
        runs += value_stride
        v = slots.read(layer, scales, runs, within, is_own, head_dim, head_width, queries.dtype)
        sums = sums * shrink[:, None]
        sums += tl.dot(weights.to(queries.dtype), v, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        peak = new_peak

    result = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + rows, result.to(out.dtype.element_ty), mask=is_element)
