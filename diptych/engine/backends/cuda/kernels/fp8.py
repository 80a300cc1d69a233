"""Products of 8-bit floats (e4m3) with a scale for each row, of inputs and of the weight."""

import triton
import triton.language as tl

_LARGEST = tl.constexpr(448.0)  # that e4m3 has
_TINY = tl.constexpr(1e-30)  # a scale below this is zero: its reciprocal would overflow


@triton.jit  # type: ignore[untyped-decorator]
def round_rows(
    x: tl.tensor,  # [num_rows, size]
    numbers: tl.tensor,  # [num_rows, num_columns] e4m3; zeros behind the size
    scales: tl.tensor,  # [num_rows] float32; NaN for a row that is not all finite
    size: int,
    num_columns: int,
    width: tl.constexpr,  # the power of two that holds a row
) -> None:
    """The bits of ``torch.fp8_linear.round_rows`` on a host. Launched over (rows)."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, width)
    found = tl.load(x + row * size + places, mask=places < size, other=0.0).to(tl.float32)
    store_rounded(found, numbers, scales, row, num_columns, width)


@triton.jit  # type: ignore[untyped-decorator]
def store_rounded(
    found: tl.tensor,  # [width] float32, a row; zeros behind its end
    numbers: tl.tensor,
    scales: tl.tensor,
    row: tl.tensor,  # which one, int64
    num_columns: int,
    width: tl.constexpr,
) -> None:
    """Beside what else is made of it."""
    largest = tl.max(tl.where(found != found, float("inf"), tl.abs(found)), 0)
    scale = tl.div_rn(largest, _LARGEST)
    scale = tl.where(scale == float("inf"), float("nan"), scale)
    is_large = scale > _TINY
    ratio = tl.where(is_large, tl.div_rn(1.0, tl.where(is_large, scale, 1.0)), scale * 0)
    # Rounding of the ratio must not lift the largest over what there is.
    got = found * ratio
    got = tl.where(got > _LARGEST, _LARGEST, tl.where(got < -_LARGEST, -_LARGEST, got))
    places = tl.arange(0, width)
    to = numbers + row * num_columns + places
    tl.store(to, got.to(tl.float8e4nv), mask=places < num_columns)
    tl.store(scales + row, scale)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def multiply_rounded(
    x: tl.tensor,  # [num_rows, num_inputs] e4m3
    x_scales: tl.tensor,  # [num_rows] float32
    numbers: tl.tensor,  # [num_outputs, num_inputs] e4m3
    scales: tl.tensor,  # [num_outputs] float32
    bias: tl.tensor,  # [num_outputs], or None; None where there are parts
    out: tl.tensor,  # [num_parts, num_rows, num_outputs]; of parts float32
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    part: int,  # inputs of a part, a multiple of the tile's
    is_whole: tl.constexpr,  # whether tiles of inputs are all
    tile_rows: tl.constexpr,
    tile_outputs: tl.constexpr,  # 64 make it a product of a group of warps where there are such
    tile_inputs: tl.constexpr,
    num_tiles: tl.constexpr,  # that are fetched ahead, with the one that is multiplied
) -> None:
    """The weight is the first operand. Launched over (tiles of outputs, parts, tiles of rows)."""
    outputs = tl.program_id(0) * tile_outputs + tl.arange(0, tile_outputs)
    rows = tl.program_id(2) * tile_rows + tl.arange(0, tile_rows)
    places = tl.arange(0, tile_inputs)
    is_output, is_row = (outputs < num_outputs)[:, None], (rows < num_rows)[None, :]
    # In 64 bits: a weight, or a batch, may have more elements than 32 can count.
    weights = numbers + outputs.to(tl.int64)[:, None] * num_inputs + places[None, :]
    some = x + rows.to(tl.int64)[None, :] * num_inputs + places[:, None]
    sums = tl.zeros([tile_outputs, tile_rows], tl.float32)
    begin = tl.program_id(1) * part
    end = tl.minimum(begin + part, num_inputs)
    for at in tl.range(begin, end, tile_inputs, num_stages=num_tiles):
        if is_whole:
            a = tl.load(weights + at, mask=is_output, other=0.0)
            b = tl.load(some + at, mask=is_row, other=0.0)
        else:
            is_input = at + places < num_inputs
            a = tl.load(weights + at, mask=is_output & is_input[None, :], other=0.0)
            b = tl.load(some + at, mask=is_row & is_input[:, None], other=0.0)
        # Not into the sums at once: the matrix unit of sm_90 adds products of 8-bit floats to some
        # 14 bits, and what is small beside the sum of all before it would be lost.
        sums += tl.dot(a, b)
    sums *= tl.load(scales + outputs, mask=outputs < num_outputs, other=0.0)[:, None]
    sums *= tl.load(x_scales + rows, mask=rows < num_rows, other=0.0)[None, :]
    if bias is not None:
        added = tl.load(bias + outputs, mask=outputs < num_outputs, other=0.0)
        sums += added.to(tl.float32)[:, None]
    first_row = tl.program_id(1).to(tl.int64) * num_rows
    to = out + (first_row + rows)[None, :] * num_outputs + outputs[:, None]
    tl.store(to, sums.to(out.dtype.element_ty), mask=is_row & is_output)
