"""Stored bytes as numbers that products are made of.

Each conversion is one function of one argument, so that the compiler can have bytes in the
order of a product's operand before they are widened, and not after.

In instructions of its own a conversion is made four bytes at a time, into bfloat16; they are
those of any device since sm_80. Elsewhere (``asm`` is false) the same numbers come about by
plain operations. Whole numbers become those less the middle of what they may be, 8 or 128.
"""

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

# Halves of bytes become the lower bits of 128 and more in bfloat16, of which 136 are taken away.
_HALVES = """{
        .reg .b32 a, b, o, z;
        prmt.b32 a, $2, 0, 0x4140;
        prmt.b32 b, $2, 0, 0x4342;
        SHIFTS
        lop3.b32 a, a, 0x000F000F, 0x43004300, 0xEA;
        lop3.b32 b, b, 0x000F000F, 0x43004300, 0xEA;
        mov.b32 o, 0x3F803F80;
        mov.b32 z, 0xC308C308;
        fma.rn.bf16x2 $0, a, o, z;
        fma.rn.bf16x2 $1, b, o, z;
        }"""
_LOW_HALVES = tl.constexpr(_HALVES.replace("SHIFTS", ""))
_HIGH_HALVES = tl.constexpr(_HALVES.replace("SHIFTS", "shr.b32 a, a, 4; shr.b32 b, b, 4;"))


@triton.jit  # type: ignore[untyped-decorator]
def whole(found: tl.tensor, dtype: tl.constexpr, asm: tl.constexpr) -> tl.tensor:
    """Bytes less 128."""
    if not asm:
        return (found.to(tl.int32) - 128).to(dtype)
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d;
        prmt.b32 a, $2, 0x4B000000, 0x7650;
        prmt.b32 b, $2, 0x4B000000, 0x7651;
        prmt.b32 c, $2, 0x4B000000, 0x7652;
        prmt.b32 d, $2, 0x4B000000, 0x7653;
        add.f32 a, a, 0fCB000080;
        add.f32 b, b, 0fCB000080;
        add.f32 c, c, 0fCB000080;
        add.f32 d, d, 0fCB000080;
        cvt.rn.bf16x2.f32 $0, b, a;
        cvt.rn.bf16x2.f32 $1, d, c;
        }""",
        "=r,=r,r",
        [found],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit  # type: ignore[untyped-decorator]
def low(found: tl.tensor, dtype: tl.constexpr, asm: tl.constexpr) -> tl.tensor:
    """Lower halves of bytes, less 8."""
    if not asm:
        return ((found & 15).to(tl.int32) - 8).to(dtype)
    return tl.inline_asm_elementwise(
        _LOW_HALVES, "=r,=r,r", [found], dtype=tl.bfloat16, is_pure=True, pack=4
    )


@triton.jit  # type: ignore[untyped-decorator]
def high(found: tl.tensor, dtype: tl.constexpr, asm: tl.constexpr) -> tl.tensor:
    """Upper halves of bytes, less 8."""
    if not asm:
        return ((found >> 4).to(tl.int32) - 8).to(dtype)
    return tl.inline_asm_elementwise(
        _HIGH_HALVES, "=r,=r,r", [found], dtype=tl.bfloat16, is_pure=True, pack=4
    )


@triton.jit  # type: ignore[untyped-decorator]
def eighths(found: tl.tensor, dtype: tl.constexpr, asm: tl.constexpr) -> tl.tensor:
    """Bits of e4m3 as their numbers: bfloat16 has such bits, 2**120 times as small."""
    if not asm:
        return floats(found).to(dtype)
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d, m, z;
        prmt.b32 a, $2, 0, 0x1404;
        prmt.b32 b, $2, 0, 0x3424;
        and.b32 c, a, 0x7F007F00;
        and.b32 d, b, 0x7F007F00;
        shr.b32 c, c, 4;
        shr.b32 d, d, 4;
        lop3.b32 c, a, 0x80008000, c, 0xEA;
        lop3.b32 d, b, 0x80008000, d, 0xEA;
        mov.b32 m, 0x7B807B80;
        mov.b32 z, 0x80008000;
        fma.rn.bf16x2 $0, c, m, z;
        fma.rn.bf16x2 $1, d, m, z;
        }""",
        "=r,=r,r",
        [found],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit  # type: ignore[untyped-decorator]
def floats(found: tl.tensor) -> tl.tensor:
    """The same in float32, where the device converts such numbers by an instruction; or not."""
    if cuda_capability_geq(8, 9):
        return found.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32)
    bits = found.to(tl.int32)
    halves = ((bits & 128) << 8 | (bits & 127) << 7).to(tl.uint16)
    return halves.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit  # type: ignore[untyped-decorator]
def low_float(found: tl.tensor) -> tl.tensor:
    """Lower halves of bytes, less 8, in float32: by the bits of 2**23 and more."""
    return ((found.to(tl.int32) & 15) | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0


@triton.jit  # type: ignore[untyped-decorator]
def high_float(found: tl.tensor) -> tl.tensor:
    """The upper ones, by the bits of 2**19 and more."""
    return ((found.to(tl.int32) & 240) | 0x49000000).to(tl.float32, bitcast=True) - 524296.0


@triton.jit  # type: ignore[untyped-decorator]
def whole_float(found: tl.tensor) -> tl.tensor:
    """Bytes less 128 in float32."""
    return (found.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0
