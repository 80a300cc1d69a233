"""``y = x @ weight.T + bias`` in float32 for few rows of x, on the weight as it is loaded.

A weight is streamed from memory once, whatever the number of rows: that is the limit
of a decode step. A tile of rows of x times a tile of weight rows is kept in vector
registers, written here as LLVM instructions because no compiler keeps them there by
itself. While one group of weight rows is used, the next is prefetched.

A row's result has the same bits whatever the other rows are, how many they are, and
how many threads there are. Needs AVX-512, or AVX2 with FMA. Compiles in a second or
less; later processes find the result in the cache.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from diptych.engine.backends.cpu.kernels.loop import (
    FIRST_ARGUMENT,
    NUM_ITEMS,
    Call,
    Loop,
    next_item,
)
from diptych.engine.backends.cpu.kernels.processor import HAS_FMA, LANES

SUPPORTED = HAS_FMA
MIN_COLUMNS = 4  # of the weight's rows: those of one tile
_TILE_COLUMNS = MIN_COLUMNS
_TILE_ROWS = 6 if LANES == 16 else 3  # of x; with the operands, this fills the registers
_BLOCK_COLUMNS = 32  # what a thread takes at a time
_GROUPS_AHEAD = 2  # of _TILE_COLUMNS, when the next weights are fetched

_FLOAT_BYTES = 4
_I32, _I64, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
_QUAD = ir.VectorType(_FLOAT, 4)


_X, _WEIGHT, _BIAS, _Y, _ROWS, _COLUMNS, _INNER = range(FIRST_ARGUMENT, FIRST_ARGUMENT + 7)


def multiply(x: Tensor, weight: Tensor, bias: Tensor, y: Tensor) -> Call:
    """x: [rows, inner]; weight: [columns, inner]; bias: [columns]; y: [rows, columns].

    All contiguous float32 on the host; at least one row and MIN_COLUMNS columns.
    """
    rows, inner = x.shape
    columns = len(weight)
    num_blocks = (columns + _BLOCK_COLUMNS - 1) // _BLOCK_COLUMNS
    return _multiply.call(num_blocks, x, weight, bias, y, rows, columns, inner)


def _tile_code(
    _typing: Any,
    rows: Any,
    lines: Any,
    x: Any,
    weight: Any,
    bias: Any,
    y: Any,
    columns: Any,
    inner: Any,
    ahead: Any,
) -> Any:
    """The product of ``rows`` rows of x with _TILE_COLUMNS rows of the weight.

    Takes addresses and counts. Fetches ``lines`` cache lines (_TILE_COLUMNS at most), from
    ``ahead`` on, for each vector of the inner dimension.
    """

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        done = builder.append_basic_block("tiled")
        which = builder.add(builder.mul(arguments[0], _I64(8)), arguments[1])
        choice = builder.switch(which, done)
        for count, fetched in product(range(1, _TILE_ROWS + 1), range(_TILE_COLUMNS + 1)):
            block = builder.append_basic_block("tile")
            choice.add_case(_I64(count * 8 + fetched), block)
            builder.position_at_end(block)
            builder.call(_TileBuilder(builder.module, count, fetched).build(), arguments[2:])
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), generate


_tile: Any = intrinsic(_tile_code)


class _TileBuilder:
    """Writes the function for one kind of tile into an LLVM module."""

    def __init__(self, module: Any, rows: int, lines: int) -> None:
        self._rows, self._lines = rows, lines
        self._vector = ir.VectorType(_FLOAT, LANES)
        mask = ir.VectorType(ir.IntType(1), LANES)
        pointer, byte_pointer = self._vector.as_pointer(), ir.IntType(8).as_pointer()

        def declare(name: str, result: Any, *arguments: Any) -> Any:
            kind = ir.FunctionType(result, arguments)
            return cgutils.get_or_insert_function(module, kind, name)  # type: ignore[no-untyped-call]

        self._fma = declare(f"llvm.fma.v{LANES}f32", *[self._vector] * 4)
        self._masked_load = declare(
            f"llvm.masked.load.v{LANES}f32.p0", self._vector, pointer, _I32, mask, self._vector
        )
        self._prefetch = declare("llvm.prefetch.p0", ir.VoidType(), byte_pointer, _I32, _I32, _I32)
        kind = ir.FunctionType(ir.VoidType(), [_I64] * 7)
        self._function = ir.Function(module, kind, f"tile_{rows}_{lines}")
        self._function.linkage = "internal"
        self._function.attributes.add("noinline")
        self._builder = ir.IRBuilder(self._function.append_basic_block("entry"))

    def build(self) -> Any:
        x, weight, bias, y, columns, inner, ahead = self._function.args
        b = self._builder
        entry = b.block
        loop, rest, tail, done = (
            self._function.append_basic_block(name) for name in ("loop", "rest", "tail", "done")
        )
        row_bytes = b.mul(inner, _I64(_FLOAT_BYTES))
        self._x_rows = [b.add(x, b.mul(row_bytes, _I64(r))) for r in range(self._rows)]
        self._weight_rows = [b.add(weight, b.mul(row_bytes, _I64(c))) for c in range(_TILE_COLUMNS)]
        end = b.and_(inner, _I64(-LANES))
        zeros = [self._vector([0.0] * LANES)] * (self._rows * _TILE_COLUMNS)
        b.cbranch(b.icmp_signed(">", end, _I64(0)), loop, rest)

        b.position_at_end(loop)
        position = b.phi(_I64)
        sums = self._phis(len(zeros))
        offset = b.mul(position, _I64(_FLOAT_BYTES))
        looped = self._accumulate(sums, lambda row: b.load(self._at(row, offset), align=4))
        self._fetch(b.add(ahead, b.mul(offset, _I64(self._lines))))
        following = b.add(position, _I64(LANES))
        _add_incoming([position, *sums], [_I64(0), *zeros], entry)
        _add_incoming([position, *sums], [following, *looped], loop)
        b.cbranch(b.icmp_signed("<", following, end), loop, rest)

        b.position_at_end(rest)
        whole = self._phis(len(zeros))
        _add_incoming(whole, zeros, entry)
        _add_incoming(whole, looped, loop)
        b.cbranch(b.icmp_signed("<", end, inner), tail, done)

        b.position_at_end(tail)  # what is left of the inner dimension, zeros behind it
        offset = b.mul(end, _I64(_FLOAT_BYTES))
        mask = self._mask(b.trunc(b.sub(inner, end), _I32))
        tailed = self._accumulate(
            whole,
            lambda row: b.call(
                self._masked_load, [self._at(row, offset), _I32(_FLOAT_BYTES), mask, zeros[0]]
            ),
        )
        b.branch(done)

        b.position_at_end(done)
        total = self._phis(len(zeros))
        _add_incoming(total, whole, rest)
        _add_incoming(total, tailed, tail)
        offsets = b.load(b.inttoptr(bias, _QUAD.as_pointer()), align=4)
        for r in range(self._rows):
            result = self._sum_each(total[r * _TILE_COLUMNS : (r + 1) * _TILE_COLUMNS])
            target = b.add(y, b.mul(columns, _I64(r * _FLOAT_BYTES)))
            b.store(b.fadd(result, offsets), b.inttoptr(target, _QUAD.as_pointer()), align=4)
        b.ret_void()
        return self._function

    def _phis(self, count: int) -> list[Any]:
        return [self._builder.phi(self._vector) for _ in range(count)]

    def _at(self, row: Any, offset: Any) -> Any:
        b = self._builder
        return b.inttoptr(b.add(row, offset), self._vector.as_pointer())

    def _accumulate(self, sums: list[Any], load: Callable[[Any], Any]) -> list[Any]:
        """Each sum plus its product at one position of the inner dimension."""
        xs = [load(row) for row in self._x_rows]
        weights = [load(row) for row in self._weight_rows]
        return [
            self._builder.call(self._fma, [x, weight, sums[r * _TILE_COLUMNS + c]])
            for r, x in enumerate(xs)
            for c, weight in enumerate(weights)
        ]

    def _fetch(self, address: Any) -> None:
        b = self._builder
        read, second_level, data = _I32(0), _I32(2), _I32(1)
        for line in range(self._lines):
            target = b.add(address, _I64(line * LANES * _FLOAT_BYTES))
            target = b.inttoptr(target, ir.IntType(8).as_pointer())
            b.call(self._prefetch, [target, read, second_level, data])

    def _mask(self, count: Any) -> Any:
        """True in the first ``count`` lanes."""
        b = self._builder
        integers = ir.VectorType(_I32, LANES)
        first = b.insert_element(integers(ir.Undefined), count, _I32(0))
        counts = b.shuffle_vector(first, integers(ir.Undefined), integers([0] * LANES))
        return b.icmp_signed("<", integers(list(range(LANES))), counts)

    def _sum_each(self, vectors: list[Any]) -> Any:
        """The sums over the lanes of four vectors, as one vector of four."""
        b = self._builder
        first = self._add_pairs(vectors[0], vectors[1], (0, LANES, 1, LANES + 1), 2)
        second = self._add_pairs(vectors[2], vectors[3], (0, LANES, 1, LANES + 1), 2)
        quads = self._add_pairs(first, second, (0, 1, LANES, LANES + 1), 2)
        width = LANES
        while width > 4:
            width //= 2
            low, high = range(width), range(width, 2 * width)
            quads = b.fadd(self._shuffle(quads, quads, low), self._shuffle(quads, quads, high))
        return quads

    def _add_pairs(self, left: Any, right: Any, pattern: tuple[int, ...], step: int) -> Any:
        """left and right interleaved, quad by quad: the lower halves plus the upper ones."""
        low = [quad + lane for quad in range(0, LANES, 4) for lane in pattern]
        high = [lane + step for lane in low]
        return self._builder.fadd(self._shuffle(left, right, low), self._shuffle(left, right, high))

    def _shuffle(self, left: Any, right: Any, lanes: Any) -> Any:
        chosen = list(lanes)
        return self._builder.shuffle_vector(left, right, ir.VectorType(_I32, len(chosen))(chosen))


def _add_incoming(phis: list[Any], values: list[Any], block: Any) -> None:
    for phi, value in zip(phis, values, strict=True):
        phi.add_incoming(value, block)


def _blocks(task: Any) -> None:
    """Blocks of columns, as long as there are any."""
    rows, columns, inner = task[_ROWS], task[_COLUMNS], task[_INNER]
    row_bytes = inner * _FLOAT_BYTES
    num_tiles = (rows + _TILE_ROWS - 1) // _TILE_ROWS
    last = columns - _TILE_COLUMNS
    block = next_item(task)
    while block < task[NUM_ITEMS]:
        # Taken early, because its weights are fetched while the last ones of this are used.
        following = next_item(task)
        begin = block * _BLOCK_COLUMNS
        end = begin + _BLOCK_COLUMNS
        for group in range(begin, min(end, columns), _TILE_COLUMNS):
            column = min(group, last)  # the last group may do some columns again
            weight = task[_WEIGHT] + column * row_bytes
            bias = task[_BIAS] + column * _FLOAT_BYTES
            fetched = group + _GROUPS_AHEAD * _TILE_COLUMNS
            if fetched >= end:
                fetched += following * _BLOCK_COLUMNS - end
            ahead = task[_WEIGHT] + min(fetched, last) * row_bytes
            row = 0
            for tile in range(num_tiles):
                end_row = rows * (tile + 1) // num_tiles
                # All tiles of a group together fetch a group, evenly.
                lines = _TILE_COLUMNS * (tile + 1) // num_tiles
                lines -= _TILE_COLUMNS * tile // num_tiles
                x = task[_X] + row * row_bytes
                y = task[_Y] + (row * columns + column) * _FLOAT_BYTES
                _tile(end_row - row, lines, x, weight, bias, y, columns, inner, ahead)
                ahead += lines * row_bytes
                row = end_row
        block = following


# Sums may not be reordered: each kind of tile would get an order of its own.
_multiply = Loop(_blocks, {"error_model": "numpy"})
