"""Attention of prompts' chunks to blocks where they lie, many chunks in one launch.

Chunks are cut into tiles of queries; a program attends with one tile and one head, over the
keys that any of its queries sees, and keeps running sums (FlashAttention-2, Dao 2023). Keys that
all of them see need no comparison with positions, and those are nearly all of a long context.
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
    out: tl.tensor,  # [N, num_heads, head_dim]
    block_stride: int,
    value_stride: int,
    head_stride: int,
    scale: float,  # of scores, with the logarithm of e to base 2; above 0
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
    first = tl.maximum(position - window + 1, 0) if window else 0
    end = position + num_rows

    members, dims = tl.arange(0, tile_queries), tl.arange(0, head_width)
    is_element = (members < num_rows)[:, None] & (dims < head_dim)[None, :]
    rows = ((first_row + members) * num_heads + head)[:, None] * head_dim + dims[None, :]
    queries = tl.load(q + rows, mask=is_element, other=0.0)
    positions = position + members
    # In 64 bits: a pool has more elements than 32 can count.
    run = (head // group).to(tl.int64) * head_stride

    peak = tl.full([tile_queries], float("-inf"), tl.float32)
    total = tl.zeros([tile_queries], tl.float32)
    sums = tl.zeros([tile_queries, head_width], tl.float32)

    # Tiles of keys from here on; those between the second and the third all queries see.
    begin = first // tile_keys * tile_keys
    seen_end = (position + 1) // tile_keys * tile_keys
    if window:
        seen_begin = tl.cdiv(tl.maximum(end - window, 0), tile_keys) * tile_keys
        seen_begin = tl.minimum(seen_begin, seen_end)
        peak, total, sums = _attend(
            peak, total, sums, queries, positions, begin, seen_begin, first, end, table, layer,
            scales, run, block_stride, value_stride, scale, head_dim, head_width, block_size,
            window, softcap, tile_keys, is_masked=True,
        )  # fmt: skip
        begin = seen_begin
    peak, total, sums = _attend(
        peak, total, sums, queries, positions, begin, seen_end, first, end, table, layer,
        scales, run, block_stride, value_stride, scale, head_dim, head_width, block_size,
        window, softcap, tile_keys, is_masked=False,
    )  # fmt: skip
    peak, total, sums = _attend(
        peak, total, sums, queries, positions, seen_end, end, first, end, table, layer,
        scales, run, block_stride, value_stride, scale, head_dim, head_width, block_size,
        window, softcap, tile_keys, is_masked=True,
    )  # fmt: skip

    result = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + rows, result.to(out.dtype.element_ty), mask=is_element)


@triton.jit  # type: ignore[untyped-decorator]
def _attend(
    peak: tl.tensor,  # [tile_queries]
    total: tl.tensor,  # [tile_queries]
    sums: tl.tensor,  # [tile_queries, head_width]
    queries: tl.tensor,  # [tile_queries, head_width]
    positions: tl.tensor,  # [tile_queries]
    begin: tl.tensor,  # of a tile of keys
    stop: tl.tensor,
    first: tl.tensor,  # key that a query sees
    end: tl.tensor,  # behind the last one
    table: tl.tensor,
    layer: tl.tensor,
    scales: tl.tensor,
    run: tl.tensor,  # the head's, within a block
    block_stride: int,
    value_stride: int,
    scale: float,
    head_dim: tl.constexpr,
    head_width: tl.constexpr,
    block_size: tl.constexpr,
    window: tl.constexpr,
    softcap: tl.constexpr,
    tile_keys: tl.constexpr,
    is_masked: tl.constexpr,  # not every query sees every key
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The running peak, total and sums, with the keys from begin to stop."""
    # Known a tile ahead: so nothing is waited for before its keys can be asked for.
    ids = _read_ids(table, begin, end, block_size, tile_keys)
    for token in range(begin, stop, tile_keys):
        runs = _of_tokens(ids, block_size, tile_keys) * block_stride + run
        within = _slots(token, block_size, tile_keys)
        ids = _read_ids(table, token + tile_keys, end, block_size, tile_keys)
        tokens = token + tl.arange(0, tile_keys)
        is_own = None
        if is_masked:
            is_own = tokens < end
            if window:
                is_own = is_own & (tokens >= first)
        k = slots.read(layer, scales, runs, within, is_own, head_dim, head_width, queries.dtype)
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee")
        if softcap is not None:
            scores = score_forms.capped(scores * scale, softcap)
        unit = scale if softcap is None else 1.0  # to be multiplied with, where weights are taken
        if is_masked:
            is_seen = tokens[None, :] <= positions[:, None]
            if window:
                is_seen = is_seen & (tokens[None, :] > positions[:, None] - window)
            scores = tl.where(is_seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * unit)
        # A query's window may begin behind this tile: nothing seen yet, and no weight.
        level = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights, shrink = tl.exp2(scores * unit - level[:, None]), tl.exp2(peak - level)
        total = total * shrink + tl.sum(weights, 1)
        peak = new_peak
        v = slots.read(
            layer, scales, runs + value_stride, within, is_own, head_dim, head_width, queries.dtype
        )
        sums = sums * shrink[:, None]
        sums = tl.dot(weights.to(queries.dtype), v, sums, input_precision="ieee")
    return peak, total, sums


@triton.jit  # type: ignore[untyped-decorator]
def _read_ids(
    table: tl.tensor,
    token: tl.tensor,  # the first of a tile of keys
    end: tl.tensor,
    block_size: tl.constexpr,
    tile_keys: tl.constexpr,
) -> tl.tensor:
    """int64: of the blocks of a tile, or of each token's where blocks do not fit into tiles.

    0 for what is behind the end: nothing of the table is read there.
    """
    if block_size & (block_size - 1):
        tokens = token + tl.arange(0, tile_keys)
        return tl.load(table + tokens // block_size, mask=tokens < end, other=0)
    else:
        width: tl.constexpr = block_size if block_size < tile_keys else tile_keys
        tokens = token + tl.arange(0, tile_keys // width) * width
        return tl.load(table + tokens // block_size, mask=tokens < end, other=0)


@triton.jit  # type: ignore[untyped-decorator]
def _of_tokens(ids: tl.tensor, block_size: tl.constexpr, tile_keys: tl.constexpr) -> tl.tensor:
    """[tile_keys], of what ``_read_ids`` has read."""
    if block_size & (block_size - 1):
        return ids
    else:
        width: tl.constexpr = block_size if block_size < tile_keys else tile_keys
        return tl.reshape(tl.broadcast_to(ids[:, None], (tile_keys // width, width)), (tile_keys,))


@triton.jit  # type: ignore[untyped-decorator]
def _slots(token: tl.tensor, block_size: tl.constexpr, tile_keys: tl.constexpr) -> tl.tensor:
    """[tile_keys], each token's within its block."""
    members = tl.arange(0, tile_keys)
    if block_size & (block_size - 1):
        return (token + members) % block_size
    elif block_size > tile_keys:
        return token % block_size + members
    else:
        return members % block_size
