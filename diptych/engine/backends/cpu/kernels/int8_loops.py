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

from collections.abc import Callable
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
from diptych.engine.backends.cpu.kernels.vector_function import (
    FLOAT,
    I8,
    I16,
    I32,
    I64,
    VectorFunction,
    written,
)

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

_FLOATS, _INTS = ir.VectorType(FLOAT, CHANNELS), ir.VectorType(I32, CHANNELS)


class _Function(VectorFunction):
    """With what adds the sums of spans. (q, zeros, scales, weight, spans, where to) each."""

    def of_span(self, address: Any, span: Any, row: int, kind: Any) -> Any:
        """The number of a row's span."""
        num_spans = self.arguments[4]
        return self.load(self.at(address, (span, 4), (num_spans, 4 * row)), kind)

    def scaled(self, scale: Any, exact: Any, total: Any) -> Any:
        """total + scale * exact, rounded twice as plain torch does it."""
        scales = self.splat(scale, total.type.count)
        return self.b.fadd(total, self.b.fmul(self.b.sitofp(exact, total.type), scales))

    def span_loop(self, span: Callable[..., Any], *totals: Any) -> list[Any]:
        """What ``span`` makes of the totals, one span after another."""
        return self.loop(self.arguments[4], 1, span, *totals)

    def group_loop(self, span: Any, group: Callable[..., Any], *sums: Any) -> list[Any]:
        """What ``group`` makes of the sums, one group of a span after another."""
        first = self.b.mul(span, I64(SPAN_GROUPS))
        return self.loop(
            I64(SPAN_GROUPS), 1, lambda i, *sums: group(self.b.add(first, i), *sums), *sums
        )


def _write_sum_bytes(module: Any, rows: int) -> Any:
    """Sums of ``rows`` rows with one tile, by AVX-512 VNNI.

    q: int8 rows of spans * 64; zeros, scales: of the rows' spans, int32 and float32;
    weight: the tile; where to: [rows, 32] float32.
    """
    f = _Function(module, f"sum_bytes_{rows}", 6)
    q, zeros, scales, weight, num_spans, sums = f.arguments
    places = [(row, block) for row in range(rows) for block in range(BLOCKS)]
    num_groups = f.b.mul(num_spans, I64(SPAN_GROUPS))
    product = ir.FunctionType(_INTS, [_INTS] * 3)

    def group(index: Any, *exact: Any) -> list[Any]:
        channels = [
            f.load(f.at(weight, (index, _GROUP_BYTES), (num_groups, _GROUP_BYTES * b)), _INTS, 1)
            for b in range(BLOCKS)
        ]
        inputs = [
            f.splat(f.load(f.at(q, (index, DEPTH), (num_groups, DEPTH * r)), I32, 1), CHANNELS)
            for r in range(rows)
        ]
        return [
            f.b.asm(
                product,
                "vpdpbusd $3, $2, $0",
                "=v,0,v,v",
                [total, channels[block], inputs[row]],
                False,
            )
            for (row, block), total in zip(places, exact, strict=True)
        ]

    def span(index: Any, *totals: Any) -> list[Any]:
        begin = [f.splat(f.of_span(zeros, index, row, I32), CHANNELS) for row, _ in places]
        exact = f.group_loop(index, group, *begin)
        return [
            f.scaled(f.of_span(scales, index, row, FLOAT), each, total)
            for (row, _), each, total in zip(places, exact, totals, strict=True)
        ]

    totals = f.span_loop(span, *[_FLOATS(None)] * len(places))
    for (row, block), total in zip(places, totals, strict=True):
        f.store(total, f.at(sums, 4 * (row * _TILE + block * CHANNELS)))
    return f.end()


def _write_sum_pairs(module: Any, rows: int) -> Any:
    """Sums of ``rows`` rows with 8 channels, by 16-bit products.

    As above, but q: int16; weight: the first group's 8 channels, the next group 64
    bytes on; where to: the first row's 8, the next row 32 on.
    """
    f = _Function(module, f"sum_pairs_{rows}", 6)
    q, zeros, scales, weight, num_spans, sums = f.arguments
    bytes_, shorts, pairs = (ir.VectorType(k, n) for k, n in ((I8, 16), (I16, 16), (I32, 8)))
    fours, longs, floats = (ir.VectorType(k, 4) for k in (I32, I64, FLOAT))
    places = [(row, part) for row in range(rows) for part in range(2)]  # of 4 channels
    num_groups = f.b.mul(num_spans, I64(SPAN_GROUPS))
    product = f.declared("llvm.x86.avx2.pmadd.wd", ir.FunctionType(pairs, (shorts, shorts)))

    def group(index: Any, *exact: Any) -> list[Any]:
        channels = [
            f.b.zext(f.load(f.at(weight, (index, _GROUP_BYTES), 16 * part), bytes_, 1), shorts)
            for part in range(2)
        ]
        inputs = [
            f.load(f.at(q, (index, 2 * DEPTH), (num_groups, 2 * DEPTH * row)), I64, 1)
            for row in range(rows)
        ]
        inputs = [f.b.bitcast(f.splat(four, 4), shorts) for four in inputs]
        return [
            f.b.add(total, f.b.call(product, (channels[part], inputs[row])))
            for (row, part), total in zip(places, exact, strict=True)
        ]

    def sums_of_pairs(exact: Any) -> Any:
        """Not by shuffles: LLVM 22 makes poison of them where two rows are summed."""
        total = f.b.bitcast(exact, longs)
        upper = f.b.lshr(total, longs([32] * 4))
        return f.b.add(f.b.trunc(total, fours), f.b.trunc(upper, fours))

    def span(index: Any, *totals: Any) -> list[Any]:
        exact = f.group_loop(index, group, *[pairs(None)] * len(places))
        return [
            f.scaled(
                f.of_span(scales, index, row, FLOAT),
                f.b.add(sums_of_pairs(each), f.splat(f.of_span(zeros, index, row, I32), 4)),
                total,
            )
            for (row, _), each, total in zip(places, exact, totals, strict=True)
        ]

    totals = f.span_loop(span, *[floats(None)] * len(places))
    for (row, part), total in zip(places, totals, strict=True):
        f.store(total, f.at(sums, 4 * (row * _TILE + 4 * part)))
    return f.end()


# The first argument is how many rows, as a power of 2.
_sum_bytes: Any = written(_write_sum_bytes, (1,), (2,), (4,), (8,))
_sum_pairs: Any = written(_write_sum_pairs, (1,), (2,), (4,))


@intrinsic
def _scratch(typing: Any) -> Any:
    """Address of [_MAX_ROWS, 32] float32 that lasts as long as the calling function runs."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums = cgutils.alloca_once(builder, ir.ArrayType(FLOAT, _MAX_ROWS * _TILE))
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
    kind = 3 if num_rows >= 8 else 2 if num_rows >= 4 else 1 if num_rows >= 2 else 0
    _sum_bytes(kind, q, zeros, scales, weight, num_spans, sums)
    return 1 << kind


@njit(error_model="numpy", fastmath=False)
def _tile_of_pairs(task: Any, tile: int, row: int, sums: int) -> int:
    """The same for int16 rows."""
    num_rows, num_spans = task[_NUM_ROWS] - row, task[_NUM_SPANS]
    q = task[_Q] + 2 * row * num_spans * SPAN
    zeros, scales = task[_ZEROS] + 4 * row * num_spans, task[_SCALES] + 4 * row * num_spans
    kind = 2 if num_rows >= 4 else 1 if num_rows >= 2 else 0
    for part in range(4):  # 8 channels each
        block = tile * BLOCKS + part // 2
        weight = task[_WEIGHT] + block * CHANNELS * num_spans * SPAN + part % 2 * 32
        _sum_pairs(kind, q, zeros, scales, weight, num_spans, sums + 32 * part)
    return 1 << kind


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
