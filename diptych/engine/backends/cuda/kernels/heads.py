"""Queries, keys and values by heads: their norms and rotation, and the way into the cache."""

import triton
import triton.language as tl

from diptych.engine.backends.cuda.kernels import slots


@triton.jit  # type: ignore[untyped-decorator]
def rotate(
    qkv: tl.tensor,  # [N, (num_heads + 2 * num_kv_heads) * head_dim]
    cos: tl.tensor,  # [N, head_dim / 2] float32
    sin: tl.tensor,
    q_weight: tl.tensor,  # [head_dim] float32; None: no norms
    k_weight: tl.tensor,
    q: tl.tensor,  # [N, num_heads, head_dim]
    kv: tl.tensor,  # [N, 2, num_kv_heads, head_dim]
    eps: float,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    query_width: tl.constexpr,  # powers of two, of heads
    key_width: tl.constexpr,
    half_width: tl.constexpr,  # and of half a head
) -> None:
    """Launched over (rows)."""
    row = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = head_dim // 2
    pairs = tl.arange(0, half_width)
    c = tl.load(cos + row * half + pairs, mask=pairs < half, other=0.0)[None, :]
    s = tl.load(sin + row * half + pairs, mask=pairs < half, other=0.0)[None, :]
    queries = qkv + row * (num_heads + 2 * num_kv_heads) * head_dim
    out = q + row * num_heads * head_dim
    _rotate_heads(queries, q_weight, c, s, out, eps, num_heads, head_dim, query_width, half_width)
    keys = queries + num_heads * head_dim
    out = kv + row * 2 * num_kv_heads * head_dim
    _rotate_heads(keys, k_weight, c, s, out, eps, num_kv_heads, head_dim, key_width, half_width)
    size: tl.constexpr = num_kv_heads * head_dim
    places = tl.arange(0, key_width * 2 * half_width)
    values = tl.load(keys + size + places, mask=places < size, other=0.0)
    tl.store(out + size + places, values, mask=places < size)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_heads(
    heads: tl.tensor,  # [num_heads, head_dim], of one row
    weight: tl.tensor,
    cos: tl.tensor,  # [1, half_width]
    sin: tl.tensor,
    out: tl.tensor,  # [num_heads, head_dim]
    eps: float,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    half_width: tl.constexpr,
) -> None:
    half: tl.constexpr = head_dim // 2
    members, pairs = tl.arange(0, width)[:, None], tl.arange(0, half_width)[None, :]
    is_element = (members < num_heads) & (pairs < half)
    places = members * head_dim + pairs
    first = tl.load(heads + places, mask=is_element, other=0.0).to(tl.float32)
    second = tl.load(heads + places + half, mask=is_element, other=0.0).to(tl.float32)
    if weight is not None:
        squares = tl.sum(first * first + second * second, 1)
        scale = 1.0 / tl.sqrt(squares / head_dim + eps)[:, None]
        first = first * scale * tl.load(weight + pairs, mask=pairs < half, other=0.0)
        second = second * scale * tl.load(weight + half + pairs, mask=pairs < half, other=0.0)
        first = first.to(out.dtype.element_ty).to(tl.float32)
        second = second.to(out.dtype.element_ty).to(tl.float32)
    turned = (first * cos - second * sin).to(out.dtype.element_ty)
    tl.store(out + places, turned, mask=is_element)
    turned = (second * cos + first * sin).to(out.dtype.element_ty)
    tl.store(out + places + half, turned, mask=is_element)


@triton.jit(do_not_specialize=["num_tokens"])  # type: ignore[untyped-decorator]
def write(
    kv: tl.tensor,  # [num_tokens, 2, num_kv_heads, head_dim]
    targets: tl.tensor,  # [num_tokens] int64, block_id * block_size + offset; < 0: nowhere
    layer: tl.tensor,  # [num_blocks, 2, num_kv_heads] runs, strided
    scales: tl.tensor,  # where its runs have scales: at the first one's; else None
    num_tokens: int,
    block_stride: int,
    value_stride: int,
    head_stride: int,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    block_size: tl.constexpr,
    width: tl.constexpr,  # heads of tokens that a program writes
    head_width: tl.constexpr,  # a power of two
) -> None:
    """Launched over (heads of keys and values of all tokens / width)."""
    items, dims = tl.program_id(0) * width + tl.arange(0, width), tl.arange(0, head_width)
    rows, heads = items // (2 * num_kv_heads), items % (2 * num_kv_heads)
    is_item = rows < num_tokens
    is_element = is_item[:, None] & (dims < head_dim)[None, :]
    sources = items.to(tl.int64)[:, None] * head_dim + dims[None, :]
    tokens = tl.load(kv + sources, mask=is_element, other=0.0)
    target = tl.load(targets + rows, mask=is_item, other=0)
    # In 64 bits: a pool has more elements than 32 can count.
    runs = (target // block_size) * block_stride
    runs += (heads // num_kv_heads) * value_stride + (heads % num_kv_heads) * head_stride
    within = target % block_size
    is_kept = is_item & (target >= 0)
    slots.write(layer, scales, runs, within, is_kept, tokens, head_dim, head_width)
