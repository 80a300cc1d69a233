"""Products with a weight of small numbers, of which a group shares a scale and a zero.

Whole numbers less their zeros are exact in bfloat16, and so are 8-bit floats (e4m3): half
precision has their very bits, 2**8 times as small. A group's products are summed first and
scaled then, in float32, so that no weight is rounded.
"""

import triton
import triton.language as tl

_HALF = tl.constexpr(16)  # bytes of a span: numbers of four bits of twice as many inputs


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def multiply(
    x: tl.tensor,  # [num_rows, num_inputs]
    numbers: tl.tensor,  # [num_outputs, num_inputs * bits / 8] uint8
    zeros: tl.tensor,  # [num_outputs, num_inputs / group_size] uint8; None: numbers are floats
    scales: tl.tensor,  # likewise, float32
    bias: tl.tensor,  # [num_outputs], or None
    out: tl.tensor,  # [num_rows, num_outputs]
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    group_size: int,
    bits: tl.constexpr,  # 4 or 8
    tile_rows: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_inputs: tl.constexpr,  # a power of two that divides the group's size
) -> None:
    """Launched over (tiles of outputs, tiles of rows)."""
    # In 64 bits: a weight, or a batch, may have more elements than 32 can count.
    outputs = tl.program_id(0).to(tl.int64) * tile_outputs + tl.arange(0, tile_outputs)
    rows = tl.program_id(1).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    is_output, is_row = outputs < num_outputs, rows < num_rows
    places = tl.arange(0, tile_inputs * bits // 8)
    firsts = places
    if bits == 4:
        firsts = places // _HALF * (2 * _HALF) + places % _HALF
    inputs = x + rows[:, None] * num_inputs + firsts[None, :]
    packed = numbers + outputs[None, :] * (num_inputs * bits // 8) + places[:, None]
    groups = outputs * (num_inputs // group_size)
    sums = tl.zeros([tile_rows, tile_outputs], tl.float32)
    for begin in range(0, num_inputs, tile_inputs):
        group = groups + begin // group_size
        scale = tl.load(scales + group, mask=is_output, other=0.0)
        found = tl.load(packed + begin * bits // 8, mask=is_output[None, :], other=0).to(tl.int32)
        some = tl.load(inputs + begin, mask=is_row[:, None], other=0.0)
        if zeros is None:
            halves = ((found & 128) << 8 | (found & 127) << 7).to(tl.uint16)
            low = halves.to(tl.float16, bitcast=True).to(tl.float32)
            scale *= 256.0
        else:
            zero = tl.load(zeros + group, mask=is_output, other=0).to(tl.int32)[None, :]
            low = (found & 15 if bits == 4 else found) - zero
        products = tl.dot(some, low.to(some.dtype), input_precision="ieee")
        if bits == 4:
            others = tl.load(inputs + begin + _HALF, mask=is_row[:, None], other=0.0)
            high = (found >> 4) - zero
            products += tl.dot(others, high.to(some.dtype), input_precision="ieee")
        sums += products * scale[None, :]
    if bias is not None:
        sums += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    to = out + rows[:, None] * num_outputs + outputs[None, :]
    is_written = is_row[:, None] & is_output[None, :]
    tl.store(to, sums.to(out.dtype.element_ty), mask=is_written)
