"""Products of int8 rows with int8 weights; every path gives the same bits.

Where the processor sums products of bytes in 32 bits (AVX-512 VNNI) it does so.
Elsewhere pairs of 16-bit products are summed in 32 bits: the byte products of plain
AVX2 saturate at 16 bits, and so do the libraries that use them.

A weight is packed as ``[blocks, groups, 16, 4]`` uint8: blocks of 16 output channels,
an even number of them, and groups of 4 inputs. Each value has 128 added; 128 fills
what channels and inputs lack. Two blocks are a tile, the item of work. A row has a
scale for each span of 16 groups; a span's sum is exact, and spans are added in order.
"""

# numba's own types do not tell what compiled functions and intrinsics take.
# mypy: disable-error-code="attr-defined,call-arg,no-untyped-call,no-any-return,var-annotated"

from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from diptych.engine.backends.cpu.kernels.loop import (
    FIRST_ARGUMENT,
    NUM_ITEMS,
    Loop,
    float_of_bits,
    floats_at,
    int8s_at,
    int16s_at,
    int32s_at,
    next_item,
)
from diptych.engine.backends.cpu.kernels.processor import FEATURES

CHANNELS, DEPTH, BLOCKS = 16, 4, 2  # of a block, of a group, of a tile
SPAN_GROUPS = 16
SPAN = SPAN_GROUPS * DEPTH
ZERO = 128  # what stands for 0 in a packed weight
_TILE = BLOCKS * CHANNELS
_GROUP_BYTES = CHANNELS * DEPTH
_MAX_ROWS = 8  # of one pass over a tile

# What the task of a product holds: rows, their zeros and scales as they were quantised, the
# packed weight with its scales, a bias or 0.
_NUM_ROWS, _NUM_SPANS, _NUM_CHANNELS = range(FIRST_ARGUMENT, FIRST_ARGUMENT + 3)
_Q, _ZEROS, _SCALES, _WEIGHT, _OUT_SCALES, _BIAS, _OUT = range(
    FIRST_ARGUMENT + 3, FIRST_ARGUMENT + 10
)

_I32, _FLOAT = ir.IntType(32), ir.FloatType()


def _load(builder: Any, address: Any, element: Any) -> Any:
    """The vector or number at an address that need not be aligned."""
    return builder.load(builder.inttoptr(address, element.as_pointer()), align=1)


def _offset(builder: Any, address: Any, index: Any, num_bytes: int) -> Any:
    return builder.add(address, builder.mul(index, index.type(num_bytes)))


def _splat(builder: Any, value: Any, count: int) -> Any:
    single = ir.VectorType(value.type, 1)
    vector = builder.insert_element(ir.Constant(single, ir.Undefined), value, _I32(0))
    return builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(_I32, count), None))


def _scaled(builder: Any, scale: Any, sums: Any, total: Any) -> None:
    """total += scale * sums, rounded twice as plain torch does it."""
    floats = ir.VectorType(_FLOAT, sums.type.count)
    product = builder.fmul(builder.sitofp(sums, floats), _splat(builder, scale, sums.type.count))
    builder.store(builder.fadd(builder.load(total), product), total)


@intrinsic(prefer_literal=True)
def _sum_bytes(
    typing: Any,
    q: Any,
    zeros: Any,
    scales: Any,
    weight: Any,
    num_spans: Any,
    sums: Any,
    num_rows: Any,
) -> Any:
    """Sums of ``num_rows`` (a literal) rows with one tile, by AVX-512 VNNI.

    Addresses of q: int8 rows of num_spans * 64; zeros, scales: of the rows' spans,
    int32 and float32; weight: the tile; sums: [num_rows, 32] float32.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        q, zeros, scales, weight, num_spans, sums = arguments[:6]
        vector, floats = ir.VectorType(_I32, CHANNELS), ir.VectorType(_FLOAT, CHANNELS)
        rows, blocks = range(signature.args[6].literal_value), range(BLOCKS)
        totals = [
            [cgutils.alloca_once_value(builder, ir.Constant(floats, None)) for _ in blocks]
            for _ in rows
        ]
        exact = [[cgutils.alloca_once(builder, vector) for _ in blocks] for _ in rows]
        product = ir.FunctionType(vector, (vector, vector, vector))
        num_groups = builder.mul(num_spans, num_spans.type(SPAN_GROUPS))
        with cgutils.for_range(builder, num_spans) as spans:
            for row in rows:
                span = builder.add(spans.index, builder.mul(num_spans, num_spans.type(row)))
                zero = _load(builder, _offset(builder, zeros, span, 4), _I32)
                for block in blocks:
                    builder.store(_splat(builder, zero, CHANNELS), exact[row][block])
            first = builder.mul(spans.index, num_spans.type(SPAN_GROUPS))
            with cgutils.for_range(builder, num_spans.type(SPAN_GROUPS)) as loop:
                index = builder.add(first, loop.index)
                channels = []
                for block in blocks:
                    group = builder.add(index, builder.mul(num_groups, num_groups.type(block)))
                    place = _offset(builder, weight, group, _GROUP_BYTES)
                    channels.append(_load(builder, place, vector))
                for row in rows:
                    group = builder.add(index, builder.mul(num_groups, num_groups.type(row)))
                    four = _load(builder, _offset(builder, q, group, DEPTH), _I32)
                    inputs = _splat(builder, four, CHANNELS)
                    for block in blocks:
                        operands = [builder.load(exact[row][block]), channels[block], inputs]
                        summed = builder.asm(
                            product, "vpdpbusd $3, $2, $0", "=v,0,v,v", operands, False
                        )
                        builder.store(summed, exact[row][block])
            for row in rows:
                span = builder.add(spans.index, builder.mul(num_spans, num_spans.type(row)))
                scale = _load(builder, _offset(builder, scales, span, 4), _FLOAT)
                for block in blocks:
                    _scaled(builder, scale, builder.load(exact[row][block]), totals[row][block])
        for row in rows:
            for block in blocks:
                place = builder.add(sums, sums.type(4 * (row * _TILE + block * CHANNELS)))
                target = builder.inttoptr(place, floats.as_pointer())
                builder.store(builder.load(totals[row][block]), target, align=4)
        return context.get_dummy_value()

    return types.void(q, zeros, scales, weight, num_spans, sums, num_rows), generate


@intrinsic(prefer_literal=True)
def _sum_pairs(
    typing: Any,
    q: Any,
    zeros: Any,
    scales: Any,
    weight: Any,
    num_spans: Any,
    sums: Any,
    num_rows: Any,
) -> Any:
    """Sums of ``num_rows`` (a literal) rows with 8 channels, by 16-bit products.

    As above, but q: int16; weight: the first group's 8 channels, the next group 64
    bytes on; sums: the first row's 8, the next row 32 on.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        q, zeros, scales, weight, num_spans, sums = arguments[:6]
        bytes_, shorts = ir.VectorType(ir.IntType(8), 16), ir.VectorType(ir.IntType(16), 16)
        pairs, floats = ir.VectorType(_I32, 8), ir.VectorType(_FLOAT, 4)
        fours, longs = ir.VectorType(_I32, 4), ir.VectorType(ir.IntType(64), 4)
        half = ir.Constant(longs, [32] * 4)
        rows, parts = range(signature.args[6].literal_value), range(2)  # of 4 channels
        product = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(pairs, (shorts, shorts)), "llvm.x86.avx2.pmadd.wd"
        )
        totals = [
            [cgutils.alloca_once_value(builder, ir.Constant(floats, None)) for _ in parts]
            for _ in rows
        ]
        exact = [[cgutils.alloca_once(builder, pairs) for _ in parts] for _ in rows]
        num_groups = builder.mul(num_spans, num_spans.type(SPAN_GROUPS))
        with cgutils.for_range(builder, num_spans) as spans:
            for row in rows:
                for part in parts:
                    builder.store(ir.Constant(pairs, None), exact[row][part])
            first = builder.mul(spans.index, num_spans.type(SPAN_GROUPS))
            with cgutils.for_range(builder, num_spans.type(SPAN_GROUPS)) as loop:
                index = builder.add(first, loop.index)
                group = _offset(builder, weight, index, _GROUP_BYTES)
                channels = [
                    builder.zext(
                        _load(builder, builder.add(group, group.type(16 * part)), bytes_), shorts
                    )
                    for part in parts
                ]
                for row in rows:
                    group = builder.add(index, builder.mul(num_groups, num_groups.type(row)))
                    four = _load(builder, _offset(builder, q, group, 2 * DEPTH), ir.IntType(64))
                    inputs = builder.bitcast(_splat(builder, four, 4), shorts)
                    for part in parts:
                        summed = builder.call(product, (channels[part], inputs))
                        total = exact[row][part]
                        builder.store(builder.add(builder.load(total), summed), total)
            for row in rows:
                span = builder.add(spans.index, builder.mul(num_spans, num_spans.type(row)))
                zero = _splat(builder, _load(builder, _offset(builder, zeros, span, 4), _I32), 4)
                scale = _load(builder, _offset(builder, scales, span, 4), _FLOAT)
                for part in parts:
                    # Not by shuffles: LLVM 22 makes poison of them where two rows are summed.
                    total = builder.bitcast(builder.load(exact[row][part]), longs)
                    four = builder.add(
                        builder.trunc(total, fours), builder.trunc(builder.lshr(total, half), fours)
                    )
                    _scaled(builder, scale, builder.add(four, zero), totals[row][part])
        for row in rows:
            for part in parts:
                place = builder.add(sums, sums.type(4 * (row * _TILE + 4 * part)))
                target = builder.inttoptr(place, floats.as_pointer())
                builder.store(builder.load(totals[row][part]), target, align=4)
        return context.get_dummy_value()

    return types.void(q, zeros, scales, weight, num_spans, sums, num_rows), generate


@intrinsic
def _scratch(typing: Any) -> Any:
    """Address of [_MAX_ROWS, 32] float32 that lasts as long as the calling function runs."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums = cgutils.alloca_once(builder, ir.ArrayType(_FLOAT, _MAX_ROWS * _TILE))
        return builder.ptrtoint(sums, context.get_value_type(types.int64))

    return types.int64(), generate


@njit(error_model="numpy", fastmath=False)
def _finish(task: Any, tile: int, row: int, num_rows: int, sums_at: int) -> None:
    """Scale the sums of some rows into the output."""
    num_channels = task[_NUM_CHANNELS]
    sums = carray(floats_at(sums_at), (_MAX_ROWS, _TILE))
    scales = carray(floats_at(task[_OUT_SCALES]), (num_channels,))
    bias = carray(floats_at(task[_BIAS]), (num_channels,))  # address 0: none
    out = carray(floats_at(task[_OUT]), (task[_NUM_ROWS], num_channels))
    first = tile * _TILE
    count = min(_TILE, num_channels - first)
    for i in range(num_rows):
        target = out[row + i]
        for j in range(count):
            target[first + j] = sums[i, j] * scales[first + j]
        if task[_BIAS]:
            for j in range(count):
                target[first + j] += bias[first + j]


@njit(error_model="numpy", fastmath=False)
def _tile_of_bytes(task: Any, tile: int, row: int, sums: int) -> int:
    """Sums of rows from ``row`` on with a tile; how many rows."""
    num_rows, num_spans = task[_NUM_ROWS] - row, task[_NUM_SPANS]
    q = task[_Q] + row * num_spans * SPAN
    zeros, scales = task[_ZEROS] + 4 * row * num_spans, task[_SCALES] + 4 * row * num_spans
    weight = task[_WEIGHT] + tile * _TILE * num_spans * SPAN
    if num_rows >= 8:
        _sum_bytes(q, zeros, scales, weight, num_spans, sums, 8)
        return 8
    if num_rows >= 4:
        _sum_bytes(q, zeros, scales, weight, num_spans, sums, 4)
        return 4
    if num_rows >= 2:
        _sum_bytes(q, zeros, scales, weight, num_spans, sums, 2)
        return 2
    _sum_bytes(q, zeros, scales, weight, num_spans, sums, 1)
    return 1


@njit(error_model="numpy", fastmath=False)
def _tile_of_pairs(task: Any, tile: int, row: int, sums: int) -> int:
    """The same for int16 rows."""
    num_rows, num_spans = task[_NUM_ROWS] - row, task[_NUM_SPANS]
    q = task[_Q] + 2 * row * num_spans * SPAN
    zeros, scales = task[_ZEROS] + 4 * row * num_spans, task[_SCALES] + 4 * row * num_spans
    for part in range(4):  # 8 channels each
        block = tile * BLOCKS + part // 2
        weight = task[_WEIGHT] + block * CHANNELS * num_spans * SPAN + part % 2 * 32
        some = sums + 32 * part
        if num_rows >= 4:
            _sum_pairs(q, zeros, scales, weight, num_spans, some, 4)
        elif num_rows >= 2:
            _sum_pairs(q, zeros, scales, weight, num_spans, some, 2)
        else:
            _sum_pairs(q, zeros, scales, weight, num_spans, some, 1)
    return 4 if num_rows >= 4 else 2 if num_rows >= 2 else 1


def _multiply_bytes(task: Any) -> None:
    """out = rows @ weight.T * scales + bias. An item is a tile; rows are int8."""
    sums = _scratch()
    tile = next_item(task)
    while tile < task[NUM_ITEMS]:
        row = 0
        while row < task[_NUM_ROWS]:
            count = _tile_of_bytes(task, tile, row, sums)
            _finish(task, tile, row, count, sums)
            row += count
        tile = next_item(task)


def _multiply_pairs(task: Any) -> None:
    """The same; rows are int16."""
    sums = _scratch()
    tile = next_item(task)
    while tile < task[NUM_ITEMS]:
        row = 0
        while row < task[_NUM_ROWS]:
            count = _tile_of_pairs(task, tile, row, sums)
            _finish(task, tile, row, count, sums)
            row += count
        tile = next_item(task)


@njit(error_model="numpy", fastmath=False)
def _scale(bits: NDArray[np.int32]) -> np.float32:
    """Largest magnitude / 127; NaN for numbers not all finite."""
    largest = np.int32(0)  # of the numbers' bits, whose order is the magnitudes'
    for i in range(len(bits)):
        largest = max(largest, bits[i] & np.int32(0x7FFFFFFF))
    if largest >= np.int32(0x7F800000):
        return np.float32(np.nan)
    return float_of_bits(largest) / np.float32(127)


@njit(error_model="numpy", fastmath=False)
def _round(x: NDArray[np.float32], scale: np.float32, q: NDArray[Any]) -> np.int32:
    """Fill q, which may be longer than x; -128 times its sum."""
    # Tiny numbers are zero: the reciprocal of their scale would overflow.
    ratio = np.float32(1) / scale if scale > np.float32(1e-30) else np.float32(0)
    magic, total = np.float32(3 << 22), np.int32(0)  # adding it rounds, half to even
    for i in range(len(x)):
        value = np.int32((x[i] * ratio + magic) - magic)
        q[i] = value
        total += value
    for i in range(len(x), len(q)):
        q[i] = 0
    return total * np.int32(-ZERO)


# What the task of quantising holds.
_ROWS_PER_ITEM, _ROUNDED_ROWS, _SIZE, _ROUNDED_SPANS, _IS_SHORT = range(
    FIRST_ARGUMENT, FIRST_ARGUMENT + 5
)
_X, _ROUNDED, _ROUNDED_ZEROS, _ROUNDED_SCALES = range(FIRST_ARGUMENT + 5, FIRST_ARGUMENT + 9)


def _quantise(task: Any) -> None:
    """Each span of a row to -127..127 times its scale. An item is ``rows_per_item`` rows."""
    rows_per_item, num_rows, size = task[_ROWS_PER_ITEM], task[_ROUNDED_ROWS], task[_SIZE]
    num_spans, is_short = task[_ROUNDED_SPANS], task[_IS_SHORT]
    x = carray(floats_at(task[_X]), (num_rows, size))
    bits = carray(int32s_at(task[_X]), (num_rows, size))
    bytes_ = carray(int8s_at(task[_ROUNDED]), (num_rows, num_spans, SPAN))
    shorts = carray(int16s_at(task[_ROUNDED]), (num_rows, num_spans, SPAN))
    zeros = carray(int32s_at(task[_ROUNDED_ZEROS]), (num_rows, num_spans))
    scales = carray(floats_at(task[_ROUNDED_SCALES]), (num_rows, num_spans))
    item = next_item(task)
    while item < task[NUM_ITEMS]:
        for row in range(item * rows_per_item, min((item + 1) * rows_per_item, num_rows)):
            for span in range(num_spans):
                first, end = span * SPAN, min((span + 1) * SPAN, size)
                scale = _scale(bits[row, first:end])
                scales[row, span] = scale
                if is_short:
                    zeros[row, span] = _round(x[row, first:end], scale, shorts[row, span])
                else:
                    zeros[row, span] = _round(x[row, first:end], scale, bytes_[row, span])
        item = next_item(task)


quantise = Loop(_quantise)
multiply_pairs = Loop(_multiply_pairs) if "+avx2" in FEATURES else None
multiply_bytes = None
if "+avx512vnni" in FEATURES:
    binding.initialize_native_asmparser()  # without it LLVM ends the process
    multiply_bytes = Loop(_multiply_bytes)
