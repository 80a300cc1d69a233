"""Attention of single tokens to blocks where they lie: parts of each context, then merged.

A context is cut into as many parts as the launch has programs for, whatever its length, so
that the same launch serves every step of a batch of that size. Each part leaves its result and
the logarithm of its weights' sum; the parts' results are then weighed by these (Milakov and
Gimelshein 2018; Flash-Decoding). One part is the whole context, and its result that of all.
"""

import triton
import triton.language as tl

from diptych.engine.backends.cuda.kernels import score_forms, slots


@triton.jit(do_not_specialize=["table_size"])  # type: ignore[untyped-decorator]
def attend_parts(
    q: tl.tensor,  # [num_rows, num_heads, head_dim]
    layer: tl.tensor,  # [num_blocks, 2, num_kv_heads] runs, strided
    scales: tl.tensor,  # where its runs have scales: at the first one's; else None
    block_tables: tl.tensor,  # [num_rows, table_size] int64
    context_lens: tl.tensor,  # [num_rows] int64
    out: tl.tensor,  # [num_rows, num_heads, num_parts, head_dim], float32 but for one part
    logs: tl.tensor,  # [num_rows, num_heads, num_parts] float32, to base 2; -inf for an empty part;
    # None: there is one part
    table_size: int,
    block_stride: int,
    value_stride: int,
    head_stride: int,
    scale: float,  # of scores, with the logarithm of e to base 2
    group: tl.constexpr,  # query heads of a key-value head
    group_width: tl.constexpr,  # a power of two, 16 at the least: tl.dot takes no fewer
    head_dim: tl.constexpr,
    head_width: tl.constexpr,  # a power of two
    block_size: tl.constexpr,
    window: tl.constexpr,  # tokens; 0: none
    softcap: tl.constexpr,  # of scores, to base e; None: none
    tile: tl.constexpr,  # tokens that are multiplied at a time
) -> None:
    """Launched over (rows, key-value heads, parts)."""
    row = tl.program_id(0).to(tl.int64)
    kv_head, part = tl.program_id(1), tl.program_id(2)
    num_kv_heads, num_parts = tl.num_programs(1), tl.num_programs(2)
    end = tl.load(context_lens + row).to(tl.int32)
    begin = tl.maximum(end - window, 0) if window else 0
    part_size = tl.cdiv(tl.cdiv(end - begin, tile), num_parts) * tile
    first = begin + part * part_size
    last = tl.minimum(first + part_size, end)

    members, dims = tl.arange(0, group_width), tl.arange(0, head_width)
    is_element = (members < group)[:, None] & (dims < head_dim)[None, :]
    heads = (row * num_kv_heads + kv_head) * group + members
    queries = tl.load(q + heads[:, None] * head_dim + dims[None, :], mask=is_element, other=0.0)
    table = block_tables + row * table_size

    peak = tl.full([group_width], float("-inf"), tl.float32)
    total = tl.zeros([group_width], tl.float32)
    sums = tl.zeros([group_width, head_width], tl.float32)
    for token in range(first, last, tile):
        tokens = token + tl.arange(0, tile)
        is_own = tokens < last
        block_ids = tl.load(table + tokens // block_size, mask=is_own, other=0)
        # In 64 bits: a pool has more elements than 32 can count.
        runs = block_ids.to(tl.int64) * block_stride + kv_head * head_stride
        within = tokens % block_size
        k = slots.read(layer, scales, runs, within, is_own, head_dim, head_width, queries.dtype)
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale
        if softcap is not None:
            scores = score_forms.capped(scores, softcap)
        scores = tl.where(is_own[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights, shrink = tl.exp2(scores - new_peak[:, None]), tl.exp2(peak - new_peak)
        runs += value_stride
        v = slots.read(layer, scales, runs, within, is_own, head_dim, head_width, queries.dtype)
        sums = sums * shrink[:, None]
        sums += tl.dot(weights.to(queries.dtype), v, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        peak = new_peak

    result = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    places = heads * num_parts + part
    to = out + places[:, None] * head_dim + dims[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=is_element)
    if logs is not None:
        tl.store(logs + places, peak + tl.log2(total), mask=members < group)


@triton.jit(do_not_specialize=["num_parts"])  # type: ignore[untyped-decorator]
def merge_parts(
    parts: tl.tensor,  # [num_rows, num_heads, num_parts, head_dim]
    logs: tl.tensor,  # [num_rows, num_heads, num_parts]
    out: tl.tensor,  # [num_rows, num_heads, head_dim]
    num_parts: int,
    width: tl.constexpr,  # the most parts, a power of two
    head_dim: tl.constexpr,
    head_width: tl.constexpr,
) -> None:
    """Launched over (rows, heads)."""
    head = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    members, dims = tl.arange(0, width), tl.arange(0, head_width)
    places = head * num_parts + members
    log = tl.load(logs + places, mask=members < num_parts, other=float("-inf"))
    # A part without tokens has a logarithm of -inf, and one that met a NaN has that.
    is_filled = log != float("-inf")
    peak = tl.max(log, 0)
    weights = tl.where(is_filled, tl.exp2(log - peak), 0.0)
    # One without tokens left zeros: so nothing waits for the logarithms.
    is_loaded = (members < num_parts)[:, None] & (dims < head_dim)[None, :]
    results = tl.load(parts + places[:, None] * head_dim + dims[None, :], mask=is_loaded, other=0.0)
    total = tl.sum(weights, 0)
    result = tl.sum(results * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + head * head_dim + dims, result.to(out.dtype.element_ty), mask=dims < head_dim)
