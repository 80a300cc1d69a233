"""Products with a weight of small numbers, of which a group shares a scale and a zero.

The numbers are exact in bfloat16. A group's products are summed first and scaled then, in
float32, so that no weight is rounded. What zeros take from a sum is the same for all numbers of
a group, ``zero * scale * sum(inputs)``: it is taken out afterwards, unless all zeros are the middle
of what numbers may be. Scales, and these ``offsets`` (zeros less the middle, times scales), lie by
groups, [num_groups, num_outputs], as they are read.
"""

import triton
import triton.language as tl

from diptych.engine.backends.cuda.kernels import unpack

_HALF = tl.constexpr(16)  # bytes of a span: numbers of four bits of twice as many inputs


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def multiply(
    x: tl.tensor,  # [num_rows, num_inputs]
    numbers: tl.tensor,  # [num_outputs, num_inputs * bits / 8] uint8
    offsets: tl.tensor,  # [num_groups, num_outputs] float32; None: there are none
    scales: tl.tensor,  # likewise
    bias: tl.tensor,  # [num_outputs], or None; None where there are parts
    out: tl.tensor,  # [num_parts, num_rows, num_outputs]; of parts float32
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    part: int,  # inputs of a part, a multiple of the tile's
    group_size: tl.constexpr,
    bits: tl.constexpr,  # 4 or 8
    is_floats: tl.constexpr,  # e4m3
    is_single: tl.constexpr,  # whether one group is all inputs
    tile_rows: tl.constexpr,  # below 64: such products take what they unpacked from registers
    has_others: tl.constexpr,  # whether as many rows again go with what was unpacked for these
    tile_outputs: tl.constexpr,
    tile_inputs: tl.constexpr,  # a power of two that divides the group's size
    asm: tl.constexpr,  # inputs are bfloat16, and this is compiled
    num_tiles: tl.constexpr,  # that are fetched ahead, with the one that is multiplied
) -> None:
    """Launched over (tiles of outputs, parts, tiles of rows)."""
    outputs = tl.program_id(0) * tile_outputs + tl.arange(0, tile_outputs)
    num_tile_rows: tl.constexpr = tile_rows * 2 if has_others else tile_rows
    rows = tl.program_id(2) * num_tile_rows + tl.arange(0, tile_rows)
    others = rows + tile_rows
    places = tl.arange(0, tile_inputs * bits // 8)
    firsts = places
    if bits == 4:
        firsts = places // _HALF * (2 * _HALF) + places % _HALF
    # In 64 bits: a weight, or a batch, may have more elements than 32 can count. Behind the
    # last output there is that one again, and it is not written.
    read = tl.minimum(outputs, num_outputs - 1)
    packed = numbers + read.to(tl.int64)[None, :] * (num_inputs * bits // 8) + places[:, None]
    some = x + rows.to(tl.int64)[:, None] * num_inputs + firsts[None, :]
    more = x + others.to(tl.int64)[:, None] * num_inputs + firsts[None, :]
    is_row, is_other = (rows < num_rows)[:, None], (others < num_rows)[:, None]
    sums = tl.zeros([tile_rows, tile_outputs], tl.float32)
    counts = tl.zeros([tile_rows], tl.float32)
    if has_others:
        other_sums, other_counts = sums, counts
    begin = tl.program_id(1) * part
    end = tl.minimum(begin + part, num_inputs)
    for at in tl.range(begin, end, tile_inputs, num_stages=num_tiles):
        found = tl.load(packed + at * bits // 8)
        a = tl.load(some + at, mask=is_row, other=0.0)
        b = a
        if bits == 4:
            b = tl.load(some + at + _HALF, mask=is_row, other=0.0)
        if has_others:
            c = tl.load(more + at, mask=is_other, other=0.0)
            d = c
            if bits == 4:
                d = tl.load(more + at + _HALF, mask=is_other, other=0.0)
        if is_single:
            sums = _multiplied(a, b, found, sums, bits, is_floats, asm)
            if offsets is not None:
                counts += _counted(a, b, bits)
            if has_others:
                other_sums = _multiplied(c, d, found, other_sums, bits, is_floats, asm)
                if offsets is not None:
                    other_counts += _counted(c, d, bits)
        else:
            place = at // group_size * num_outputs + read
            scale = tl.load(scales + place)[None, :]
            sums += _multiplied(a, b, found, tl.zeros_like(sums), bits, is_floats, asm) * scale
            if has_others:
                got = _multiplied(c, d, found, tl.zeros_like(sums), bits, is_floats, asm)
                other_sums += got * scale
            if offsets is not None:
                offset = tl.load(offsets + place)[None, :]
                sums -= _counted(a, b, bits)[:, None] * offset
                if has_others:
                    other_sums -= _counted(c, d, bits)[:, None] * offset
    if is_single:
        scale = tl.load(scales + read)[None, :]
        sums *= scale
        if has_others:
            other_sums *= scale
        if offsets is not None:
            offset = tl.load(offsets + read)[None, :]
            sums -= counts[:, None] * offset
            if has_others:
                other_sums -= other_counts[:, None] * offset
    if bias is not None:
        added = tl.load(bias + read).to(tl.float32)[None, :]
        sums += added
        if has_others:
            other_sums += added
    first_row = tl.program_id(1).to(tl.int64) * num_rows
    is_written = (outputs < num_outputs)[None, :]
    to = out + (first_row + rows)[:, None] * num_outputs + outputs[None, :]
    tl.store(to, sums.to(out.dtype.element_ty), mask=is_row & is_written)
    if has_others:
        to = out + (first_row + others)[:, None] * num_outputs + outputs[None, :]
        tl.store(to, other_sums.to(out.dtype.element_ty), mask=is_other & is_written)


@triton.jit  # type: ignore[untyped-decorator]
def _multiplied(
    a: tl.tensor,  # [rows, bytes], inputs of bytes, or of their lower halves
    b: tl.tensor,  # of their upper halves
    found: tl.tensor,  # [bytes, outputs]
    sums: tl.tensor,  # what the products are added to
    bits: tl.constexpr,
    is_floats: tl.constexpr,
    asm: tl.constexpr,
) -> tl.tensor:
    if is_floats:
        return tl.dot(a, unpack.eighths(found, a.dtype, asm), sums, input_precision="ieee")
    if bits == 8:
        return tl.dot(a, unpack.whole(found, a.dtype, asm), sums, input_precision="ieee")
    sums = tl.dot(a, unpack.low(found, a.dtype, asm), sums, input_precision="ieee")
    return tl.dot(b, unpack.high(found, a.dtype, asm), sums, input_precision="ieee")


@triton.jit  # type: ignore[untyped-decorator]
def _counted(a: tl.tensor, b: tl.tensor, bits: tl.constexpr) -> tl.tensor:
    """The sums of rows, without the matrix unit: its warps would be laid out by that product."""
    counts = tl.sum(a.to(tl.float32), 1)
    if bits == 4:
        counts += tl.sum(b.to(tl.float32), 1)
    return counts


@triton.jit  # type: ignore[untyped-decorator]
def sum_groups(
    x: tl.tensor,  # [num_inputs]
    numbers: tl.tensor,
    offsets: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,  # [num_outputs]
    num_outputs: int,
    num_inputs: int,
    group_size: tl.constexpr,
    bits: tl.constexpr,
    is_floats: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_inputs: tl.constexpr,  # a power of two that divides the group's size
    num_tiles: tl.constexpr,  # that are multiplied at a time
    is_whole: tl.constexpr,  # whether so many tiles at a time are all
) -> None:
    """One row's products, without a matrix unit. Launched over (tiles of outputs)."""
    width: tl.constexpr = tile_inputs * bits // 8
    step: tl.constexpr = tile_inputs * num_tiles
    outputs = tl.program_id(0) * tile_outputs + tl.arange(0, tile_outputs)
    read = tl.minimum(outputs, num_outputs - 1)
    places, tiles = tl.arange(0, num_tiles * width), tl.arange(0, num_tiles)
    firsts = places
    if bits == 4:
        firsts = places // _HALF * (2 * _HALF) + places % _HALF
    packed = numbers + read.to(tl.int64)[:, None] * (num_inputs * bits // 8) + places[None, :]
    sums = tl.zeros([tile_outputs, num_tiles], tl.float32)
    for at in range(0, num_inputs, step):
        place = (at + tiles * tile_inputs) // group_size * num_outputs
        if is_whole:
            found = tl.load(packed + at * bits // 8)
            a = tl.load(x + at + firsts).to(tl.float32)
            scale = tl.load(scales + read[:, None] + place[None, :])
        else:
            is_input, is_tile = at + firsts < num_inputs, at + tiles * tile_inputs < num_inputs
            found = tl.load(packed + at * bits // 8, mask=is_input[None, :], other=0)
            a = tl.load(x + at + firsts, mask=is_input, other=0.0).to(tl.float32)
            scale = tl.load(
                scales + read[:, None] + place[None, :], mask=is_tile[None, :], other=0.0
            )
        total = a
        if is_floats:
            products = unpack.floats(found) * a[None, :]
        elif bits == 8:
            products = unpack.whole_float(found) * a[None, :]
        else:
            if is_whole:
                b = tl.load(x + at + firsts + _HALF).to(tl.float32)
            else:
                b = tl.load(x + at + firsts + _HALF, mask=is_input, other=0.0).to(tl.float32)
            total = a + b
            products = unpack.low_float(found) * a[None, :]
            products += unpack.high_float(found) * b[None, :]
        sums += tl.sum(products.reshape(tile_outputs, num_tiles, width), 2) * scale
        if offsets is not None:
            if is_whole:
                offset = tl.load(offsets + read[:, None] + place[None, :])
            else:
                offset = tl.load(
                    offsets + read[:, None] + place[None, :], mask=is_tile[None, :], other=0.0
                )
            sums -= tl.sum(total.reshape(num_tiles, width), 1)[None, :] * offset
    result = tl.sum(sums, 1)
    if bias is not None:
        result += tl.load(bias + read).to(tl.float32)
    tl.store(out + outputs, result.to(out.dtype.element_ty), mask=outputs < num_outputs)


@triton.jit  # type: ignore[untyped-decorator]
def widen(
    numbers: tl.tensor,
    offsets: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,  # [num_rows, num_inputs], of outputs from the first one on
    first_output: int,
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    group_size: tl.constexpr,
    bits: tl.constexpr,
    is_floats: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_bytes: tl.constexpr,
) -> None:
    """What numbers stand for. Launched over (tiles of a row's bytes, tiles of rows)."""
    places = tl.program_id(0) * tile_bytes + tl.arange(0, tile_bytes)
    rows = tl.program_id(1) * tile_rows + tl.arange(0, tile_rows)
    num_bytes = num_inputs * bits // 8
    outputs = (first_output + rows)[:, None]
    firsts = places
    if bits == 4:
        firsts = places // _HALF * (2 * _HALF) + places % _HALF
    is_inside = (rows < num_rows)[:, None] & (places < num_bytes)[None, :]
    at = numbers + outputs.to(tl.int64) * num_bytes + places[None, :]
    found = tl.load(at, mask=is_inside, other=0)
    group = (firsts // group_size)[None, :] * num_outputs + outputs
    scale = tl.load(scales + group, mask=is_inside, other=0.0)
    to = out + rows.to(tl.int64)[:, None] * num_inputs + firsts[None, :]
    if is_floats:
        first = unpack.floats(found) * scale
    elif bits == 8:
        first = unpack.whole_float(found) * scale
    else:
        first = unpack.low_float(found) * scale
        second = unpack.high_float(found) * scale
    if offsets is not None:
        offset = tl.load(offsets + group, mask=is_inside, other=0.0)
        first -= offset
        if bits == 4:
            second -= offset
    tl.store(to, first.to(out.dtype.element_ty), mask=is_inside)
    if bits == 4:
        tl.store(to + _HALF, second.to(out.dtype.element_ty), mask=is_inside)
