"""Products of int8 rows with int8 weights. The sums are exact, so every path gives the same bits.

Where the processor sums products of bytes in 32 bits (AVX-512 VNNI) it does so.
Elsewhere pairs of 16-bit products are summed in 32 bits: the byte products of plain
AVX2 saturate at 16 bits, and so do the libraries that use them.

A weight is packed as ``[blocks, groups, 16, 4]`` uint8: blocks of 16 output channels,
an even number of them, and groups of 4 inputs. Each value has 128 added; 128 fills
what channels and inputs lack. Two blocks are a tile, the item of work.
"""

# numba's own types do not tell what compiled functions and intrinsics take.
# mypy: disable-error-code="attr-defined,call-arg,no-untyped-call,no-any-return,var-annotated"

from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic
from numpy.typing import NDArray

from diptych.engine.kernels.loop import NUM_ITEMS, Loop, float_of_bits, floats_at, next_item

CHANNELS, DEPTH, BLOCKS = 16, 4, 2  # of a block, of a group, of a tile
ZERO = 128  # what stands for 0 in a packed weight
_TILE = BLOCKS * CHANNELS
_GROUP_BYTES = CHANNELS * DEPTH
_MAX_ROWS = 8  # of one pass over a tile

_FEATURES = cpu_target.target_context.codegen().magic_tuple()[2].split(",")

_I32 = ir.IntType(32)


def _pointer_intrinsic(element: Any) -> Any:
    @intrinsic
    def at(typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(types.int64), generate

    return at


_int8s_at = _pointer_intrinsic(types.int8)
_int16s_at = _pointer_intrinsic(types.int16)
_int32s_at = _pointer_intrinsic(types.int32)


def _load(builder: Any, address: Any, element: Any) -> Any:
    """The vector or number at an address that need not be aligned."""
    return builder.load(builder.inttoptr(address, element.as_pointer()), align=1)


def _offset(builder: Any, address: Any, index: Any, num_bytes: int) -> Any:
    return builder.add(address, builder.mul(index, index.type(num_bytes)))


def _splat(builder: Any, value: Any, count: int) -> Any:
    single = ir.VectorType(value.type, 1)
    vector = builder.insert_element(ir.Constant(single, ir.Undefined), value, _I32(0))
    return builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(_I32, count), None))


@intrinsic(prefer_literal=True)
def _sum_bytes(typing: Any, q: Any, weight: Any, num_groups: Any, sums: Any, num_rows: Any) -> Any:
    """Sums of ``num_rows`` (a literal) rows with one tile, by AVX-512 VNNI.

    q: address of int8 rows of num_groups * 4; weight: address of the tile; sums:
    address of [num_rows, 32] int32.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        q, weight, num_groups, sums = arguments[:4]
        vector = ir.VectorType(_I32, CHANNELS)
        rows = range(signature.args[4].literal_value)
        totals = [
            [cgutils.alloca_once_value(builder, ir.Constant(vector, None)) for _ in range(BLOCKS)]
            for _ in rows
        ]
        product = ir.FunctionType(vector, (vector, vector, vector))
        with cgutils.for_range(builder, num_groups) as loop:
            blocks = []
            for block in range(BLOCKS):
                group = builder.add(loop.index, builder.mul(num_groups, num_groups.type(block)))
                blocks.append(_load(builder, _offset(builder, weight, group, _GROUP_BYTES), vector))
            for row in rows:
                group = builder.add(loop.index, builder.mul(num_groups, num_groups.type(row)))
                inputs = _splat(
                    builder, _load(builder, _offset(builder, q, group, DEPTH), _I32), CHANNELS
                )
                for total, channels in zip(totals[row], blocks, strict=True):
                    summed = builder.asm(
                        product,
                        "vpdpbusd $3, $2, $0",
                        "=v,0,v,v",
                        [builder.load(total), channels, inputs],
                        False,
                    )
                    builder.store(summed, total)
        for row in rows:
            for block, total in enumerate(totals[row]):
                place = builder.add(sums, sums.type(4 * (row * _TILE + block * CHANNELS)))
                builder.store(
                    builder.load(total), builder.inttoptr(place, vector.as_pointer()), align=4
                )
        return context.get_dummy_value()

    return types.void(q, weight, num_groups, sums, num_rows), generate


@intrinsic(prefer_literal=True)
def _sum_pairs(typing: Any, q: Any, weight: Any, num_groups: Any, sums: Any, num_rows: Any) -> Any:
    """Sums of ``num_rows`` (a literal) rows with 8 channels, by 16-bit products.

    q: address of int16 rows of num_groups * 4; weight: address of the first group's
    8 channels, the next group 64 bytes on; sums: address of the first row's 8 sums,
    the next row 32 on, int32.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        q, weight, num_groups, sums = arguments[:4]
        bytes_, shorts = ir.VectorType(ir.IntType(8), 16), ir.VectorType(ir.IntType(16), 16)
        pairs = ir.VectorType(_I32, 8)
        rows, parts = range(signature.args[4].literal_value), range(2)  # of 4 channels
        product = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(pairs, (shorts, shorts)), "llvm.x86.avx2.pmadd.wd"
        )
        totals = [
            [cgutils.alloca_once_value(builder, ir.Constant(pairs, None)) for _ in parts]
            for _ in rows
        ]
        with cgutils.for_range(builder, num_groups) as loop:
            group = _offset(builder, weight, loop.index, _GROUP_BYTES)
            channels = [
                builder.zext(
                    _load(builder, builder.add(group, group.type(16 * part)), bytes_), shorts
                )
                for part in parts
            ]
            for row in rows:
                group = builder.add(loop.index, builder.mul(num_groups, num_groups.type(row)))
                four = _load(builder, _offset(builder, q, group, 2 * DEPTH), ir.IntType(64))
                inputs = builder.bitcast(_splat(builder, four, 4), shorts)
                for part in parts:
                    summed = builder.call(product, (channels[part], inputs))
                    total = totals[row][part]
                    builder.store(builder.add(builder.load(total), summed), total)
        fours, longs = ir.VectorType(_I32, 4), ir.VectorType(ir.IntType(64), 4)
        half = ir.Constant(longs, [32] * 4)
        for row in rows:
            for part in parts:
                # Not by shuffles: LLVM 22 makes poison of them where two rows are summed.
                total = builder.bitcast(builder.load(totals[row][part]), longs)
                four = builder.add(
                    builder.trunc(total, fours), builder.trunc(builder.lshr(total, half), fours)
                )
                place = builder.add(sums, sums.type(4 * (row * _TILE + 4 * part)))
                builder.store(four, builder.inttoptr(place, fours.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(q, weight, num_groups, sums, num_rows), generate


@intrinsic
def _scratch(typing: Any) -> Any:
    """Address of [_MAX_ROWS, 32] int32 that lasts as long as the calling function runs."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums = cgutils.alloca_once(builder, ir.ArrayType(_I32, _MAX_ROWS * _TILE))
        return builder.ptrtoint(sums, context.get_value_type(types.int64))

    return types.int64(), generate


@njit(error_model="numpy", fastmath=False)
def _scale_sums(
    sums: NDArray[np.int32],
    zero_sum: np.int32,
    row_scale: np.float32,
    scales: NDArray[np.float32],
    out: NDArray[np.float32],
) -> None:
    for i in range(len(out)):
        out[i] = np.float32(sums[i] - zero_sum) * (row_scale * scales[i])


@njit(error_model="numpy", fastmath=False)
def _add(bias: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    for i in range(len(out)):
        out[i] += bias[i]


@njit(error_model="numpy", fastmath=False)
def _tile_of_bytes(q: int, weight: int, num_groups: int, sums: int, num_rows: int) -> int:
    """Sums of the next rows with a tile; how many rows."""
    if num_rows >= 8:
        _sum_bytes(q, weight, num_groups, sums, 8)
        return 8
    if num_rows >= 4:
        _sum_bytes(q, weight, num_groups, sums, 4)
        return 4
    if num_rows >= 2:
        _sum_bytes(q, weight, num_groups, sums, 2)
        return 2
    _sum_bytes(q, weight, num_groups, sums, 1)
    return 1


@njit(error_model="numpy", fastmath=False)
def _tile_of_pairs(q: int, weight: int, num_groups: int, sums: int, num_rows: int) -> int:
    """Sums of the next rows with a tile; how many rows."""
    for part in range(4):
        first = weight + (part // 2) * num_groups * 64 + part % 2 * 32
        if num_rows >= 4:
            _sum_pairs(q, first, num_groups, sums + 32 * part, 4)
        elif num_rows >= 2:
            _sum_pairs(q, first, num_groups, sums + 32 * part, 2)
        else:
            _sum_pairs(q, first, num_groups, sums + 32 * part, 1)
    return 4 if num_rows >= 4 else 2 if num_rows >= 2 else 1


@njit(error_model="numpy", fastmath=False)
def _finish(task: Any, tile: int, row: int, num_rows: int, sums_at: int) -> None:
    """Scale the sums of some rows into the output."""
    num_channels = task[4]
    sums = carray(_int32s_at(sums_at), (_MAX_ROWS, _TILE))
    zero_sums = carray(_int32s_at(task[6]), (task[2],))
    row_scales = carray(floats_at(task[7]), (task[2],))
    scales = carray(floats_at(task[9]), (num_channels,))
    bias = carray(floats_at(task[10]), (num_channels,))  # address 0: none
    out = carray(floats_at(task[11]), (task[2], num_channels))
    first, end = tile * _TILE, min((tile + 1) * _TILE, num_channels)
    for i in range(row, row + num_rows):
        target = out[i, first:end]
        _scale_sums(sums[i - row], zero_sums[i], row_scales[i], scales[first:end], target)
        if task[10]:
            _add(bias[first:end], target)


def _multiply_bytes(task: Any) -> None:
    """out = rows @ weight.T * scales + bias. An item is a tile; rows are int8."""
    num_rows, num_groups, q, weight = task[2], task[3], task[5], task[8]
    sums = _scratch()
    tile = next_item(task)
    while tile < task[NUM_ITEMS]:
        row = 0
        while row < num_rows:
            count = _tile_of_bytes(
                q + row * num_groups * DEPTH,
                weight + tile * BLOCKS * num_groups * _GROUP_BYTES,
                num_groups,
                sums,
                num_rows - row,
            )
            _finish(task, tile, row, count, sums)
            row += count
        tile = next_item(task)


def _multiply_pairs(task: Any) -> None:
    """The same; rows are int16."""
    num_rows, num_groups, q, weight = task[2], task[3], task[5], task[8]
    sums = _scratch()
    tile = next_item(task)
    while tile < task[NUM_ITEMS]:
        row = 0
        while row < num_rows:
            count = _tile_of_pairs(
                q + 2 * row * num_groups * DEPTH,
                weight + tile * BLOCKS * num_groups * _GROUP_BYTES,
                num_groups,
                sums,
                num_rows - row,
            )
            _finish(task, tile, row, count, sums)
            row += count
        tile = next_item(task)


@njit(error_model="numpy", fastmath=False)
def _row_scale(bits: NDArray[np.int32]) -> np.float32:
    """Largest magnitude / 127; NaN for a row that is not all finite."""
    largest = np.int32(0)  # of the numbers' bits, whose order is the magnitudes'
    for i in range(len(bits)):
        largest = max(largest, bits[i] & np.int32(0x7FFFFFFF))
    if largest >= np.int32(0x7F800000):
        return np.float32(np.nan)
    return float_of_bits(largest) / np.float32(127)


@njit(error_model="numpy", fastmath=False)
def _quantise_row(x: NDArray[np.float32], row_scale: np.float32, q: NDArray[Any]) -> np.int32:
    """Fill q, which may be longer than x; 128 times its sum."""
    # Tiny rows are zero: the reciprocal of their scale would overflow.
    ratio = np.float32(1) / row_scale if row_scale > np.float32(1e-30) else np.float32(0)
    magic, total = np.float32(3 << 22), np.int32(0)  # adding it rounds, half to even
    for i in range(len(x)):
        value = np.int32((x[i] * ratio + magic) - magic)
        q[i] = value
        total += value
    for i in range(len(x), len(q)):
        q[i] = 0
    return total * np.int32(ZERO)


def _quantise(task: Any) -> None:
    """Each row to -127..127 times its own scale. An item is ``rows_per_item`` rows."""
    rows_per_item, num_rows, size, padded, is_short = task[2], task[3], task[4], task[5], task[6]
    x = carray(floats_at(task[7]), (num_rows, size))
    bits = carray(_int32s_at(task[7]), (num_rows, size))
    bytes_ = carray(_int8s_at(task[8]), (num_rows, padded))
    shorts = carray(_int16s_at(task[8]), (num_rows, padded))
    zero_sums = carray(_int32s_at(task[9]), (num_rows,))
    row_scales = carray(floats_at(task[10]), (num_rows,))
    item = next_item(task)
    while item < task[NUM_ITEMS]:
        for row in range(item * rows_per_item, min((item + 1) * rows_per_item, num_rows)):
            row_scales[row] = _row_scale(bits[row])
            if is_short:
                zero_sums[row] = _quantise_row(x[row], row_scales[row], shorts[row])
            else:
                zero_sums[row] = _quantise_row(x[row], row_scales[row], bytes_[row])
        item = next_item(task)


quantise = Loop(_quantise)
multiply_pairs = Loop(_multiply_pairs) if "+avx2" in _FEATURES else None
multiply_bytes = None
if "+avx512vnni" in _FEATURES:
    binding.initialize_native_asmparser()  # without it LLVM ends the process
    multiply_bytes = Loop(_multiply_bytes)
