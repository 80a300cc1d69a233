"""One row by a weight in floats, or in small numbers with a scale for each output."""

import triton
import triton.language as tl

from diptych.engine.backends.cuda.kernels import unpack


@triton.jit  # type: ignore[untyped-decorator]
def sum_row(
    x: tl.tensor,  # [num_inputs]; e4m3, if the numbers are
    x_scale: tl.tensor,  # [1] float32, or None
    numbers: tl.tensor,  # [num_outputs, num_inputs] e4m3, uint8, or floats as x
    offsets: tl.tensor,  # [num_outputs] float32, zeros less 128 times scales; None: none
    scales: tl.tensor,  # [num_outputs] float32, or None
    bias: tl.tensor,  # [num_outputs], or None
    out: tl.tensor,  # [num_outputs]
    num_outputs: int,
    num_inputs: int,
    is_whole: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_inputs: tl.constexpr,
    num_tiles: tl.constexpr,
) -> None:
    """One row's products, without a matrix unit. Launched over (tiles of outputs)."""
    outputs = tl.program_id(0) * tile_outputs + tl.arange(0, tile_outputs)
    read = tl.minimum(outputs, num_outputs - 1)
    places = tl.arange(0, tile_inputs)
    weights = numbers + read.to(tl.int64)[:, None] * num_inputs + places[None, :]
    sums = tl.zeros([tile_outputs, tile_inputs], tl.float32)
    counts = tl.zeros([tile_inputs], tl.float32)
    for at in tl.range(0, num_inputs, tile_inputs, num_stages=num_tiles):
        if is_whole:
            found = tl.load(weights + at)
            some = tl.load(x + at + places)
        else:
            is_input = at + places < num_inputs
            found = tl.load(weights + at, mask=is_input[None, :], other=0.0)
            some = tl.load(x + at + places, mask=is_input, other=0.0)
        if found.dtype == tl.uint8:
            some = some.to(tl.float32)
            sums += unpack.whole_float(found) * some[None, :]
            if offsets is not None:
                counts += some
        elif found.dtype == tl.float8e4nv:
            # By float16: there are instructions for that.
            sums += (
                found.to(tl.float16).to(tl.float32) * some.to(tl.float16).to(tl.float32)[None, :]
            )
        else:
            sums += found.to(tl.float32) * some.to(tl.float32)[None, :]
    result = tl.sum(sums, 1)
    if scales is not None:
        result *= tl.load(scales + read)
    if offsets is not None:
        result -= tl.sum(counts, 0) * tl.load(offsets + read)
    if x_scale is not None:
        result *= tl.load(x_scale)
    if bias is not None:
        result += tl.load(bias + read).to(tl.float32)
    tl.store(out + outputs, result.to(out.dtype.element_ty), mask=outputs < num_outputs)
