"""Tokens of one head in their slots: float elements, or int8 with a scale for each token.

8-bit floats (e4m3) come as bytes: devices since sm_89 have an instruction that converts them, for
others they are taken apart, into the same bits.
"""

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from diptych.engine.backends.cuda.kernels import unpack

_ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2**23: added and taken away, it rounds half to even
_TINY = tl.constexpr(1e-30)  # a scale below this is zero: its reciprocal would overflow
_LARGEST = tl.constexpr(448.0)  # of e4m3, which has no infinity
_NORMAL = tl.constexpr(2.0**-6)  # the least e4m3 with a leading one that is not written
_STEPS = tl.constexpr(2.0**9)  # below that: so many between 0 and 1
_NOT_A_NUMBER = tl.constexpr(0x7F)


@triton.jit  # type: ignore[untyped-decorator]
def read(
    layer: tl.tensor,  # [num_blocks, 2, num_kv_heads] runs, strided
    scales: tl.tensor,  # the first run's, where runs have scales; else None
    runs: tl.tensor,  # [num_tokens] int64, where each token's run begins, in elements
    slots: tl.tensor,  # [num_tokens], each token's within its run
    is_own: tl.tensor,  # [num_tokens]; None: all are
    head_dim: tl.constexpr,
    head_width: tl.constexpr,
    dtype: tl.constexpr,
) -> tl.tensor:
    """[num_tokens, head_width]; zeros for what is not the sequence's own, which is not read."""
    dims = tl.arange(0, head_width)
    places = (runs + slots * head_dim)[:, None] + dims[None, :]
    if is_own is not None:
        is_loaded = is_own[:, None] & (dims < head_dim)[None, :]
        tokens = tl.load(layer + places, mask=is_loaded, other=0)
    elif head_dim < head_width:
        tokens = tl.load(layer + places, mask=(dims < head_dim)[None, :], other=0)
    else:
        tokens = tl.load(layer + places)
    if scales is not None:
        if is_own is not None:
            scale = tl.load(scales + runs // 4 + slots, mask=is_own, other=0.0)
        else:
            scale = tl.load(scales + runs // 4 + slots)
        # Without a conversion from whole numbers, of which there are few at a time.
        tokens = unpack.whole_float(tokens.to(tl.uint8, bitcast=True) ^ 0x80) * scale[:, None]
    elif layer.dtype.element_ty == tl.uint8:
        tokens = _from_e4m3(tokens)
    return tokens.to(dtype)


@triton.jit  # type: ignore[untyped-decorator]
def write(
    layer: tl.tensor,  # as for reading
    scales: tl.tensor,
    runs: tl.tensor,  # [num_tokens] int64
    slots: tl.tensor,  # [num_tokens]
    is_own: tl.tensor,  # [num_tokens]
    tokens: tl.tensor,  # [num_tokens, head_width], zeros behind head_dim
    head_dim: tl.constexpr,
    head_width: tl.constexpr,
) -> None:
    """Largest error of an int8 element: 1/254 of the largest of its token; of e4m3: 1/16."""
    dims = tl.arange(0, head_width)
    if scales is not None:
        tokens = tokens.to(tl.float32)
        largest = tl.max(tl.abs(tokens), 1)
        is_finite = tl.min((tl.abs(tokens) < float("inf")).to(tl.int32), 1) == 1
        scale = tl.where(is_finite, largest / 127.0, float("nan"))
        ratio = tl.where(scale > _TINY, 1.0 / scale, 0.0)
        tokens = tl.where(is_finite[:, None], tokens * ratio[:, None], 0.0)
        tokens = (tokens + _ROUNDER) - _ROUNDER
        tl.store(scales + runs // 4 + slots, scale, mask=is_own)
    elif layer.dtype.element_ty == tl.uint8:
        tokens = _to_e4m3(tokens.to(tl.float32))
    is_written = is_own[:, None] & (dims < head_dim)[None, :]
    places = (runs + slots * head_dim)[:, None] + dims[None, :]
    tl.store(layer + places, tokens.to(layer.dtype.element_ty), mask=is_written)


@triton.jit  # type: ignore[untyped-decorator]
def _from_e4m3(codes: tl.tensor) -> tl.tensor:
    """float32. Its fields are those of a float16, whose exponent counts from 8 less."""
    if cuda_capability_geq(8, 9):
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32)
    magnitude = (codes & 0x7F).to(tl.uint16)
    halves = ((codes & 0x80).to(tl.uint16) << 8) | (magnitude << 7)
    values = halves.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where(magnitude == _NOT_A_NUMBER, float("nan"), values)


@triton.jit  # type: ignore[untyped-decorator]
def _to_e4m3(values: tl.tensor) -> tl.tensor:
    """The nearest's code, half to even. values: float32; beyond the largest it is that one's."""
    magnitude = tl.minimum(tl.abs(values), _LARGEST)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)  # of exponents from 2**-6
    small = ((magnitude * _STEPS + _ROUNDER) - _ROUNDER).to(tl.int32)
    code = tl.where(magnitude < _NORMAL, small, normal)
    sign = (values.to(tl.int32, bitcast=True) >> 24) & 0x80
    is_finite = tl.abs(values) < float("inf")
    return tl.where(is_finite, code | sign, _NOT_A_NUMBER)
