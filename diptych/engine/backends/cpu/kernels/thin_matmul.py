"""``y = x @ weight.T + bias`` in float32 for few rows of x, on the weight as it is kept.

A weight is streamed from memory once, whatever the number of rows: that is the limit
of a decode step. A tile of rows of x times a tile of weight rows is kept in vector
registers, written here as LLVM instructions because no compiler keeps them there by
itself. While one group of weight rows is used, the next is prefetched. Of a compact weight a
group is widened first, into memory that stays in the thread's cache, or, for very few rows of x,
in the registers.

A row's result has the same bits whatever the other rows are, how many they are, and
how many threads there are. Needs AVX-512, or AVX2 with FMA. Compiles in a second or
less; later processes find the result in the cache.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

from llvmlite import ir
from torch import Tensor

from diptych.engine.backends.cpu.kernels.compact_rows import (
    AS_THEY_ARE,
    BLOCK_SIZES,
    HEAD_BYTES,
    room,
    row_words,
    widen,
    widened,
    widened_bytes,
)
from diptych.engine.backends.cpu.kernels.loop import (
    FIRST_ARGUMENT,
    NUM_ITEMS,
    Call,
    Loop,
    next_item,
)
from diptych.engine.backends.cpu.kernels.processor import HAS_FMA, LANES
from diptych.engine.backends.cpu.kernels.vector_function import (
    FLOAT,
    I32,
    I64,
    INTEGERS,
    VECTOR,
    ZERO,
    VectorFunction,
    written,
)
from diptych.engine.model.compact import Weight

SUPPORTED = HAS_FMA
MIN_COLUMNS = 4  # of the weight's rows: those of one tile
_TILE_COLUMNS = MIN_COLUMNS
_TILE_ROWS = 6 if LANES == 16 else 3  # of x; with the operands, this fills the registers
_COMPACT_ROWS = 2  # of x, at most, for which there are tiles that widen in registers
# For so few it is faster than through memory, though with two a part of x goes to the stack; with
# 16 lanes that is not measured.
_MOST_COMPACT_ROWS = _COMPACT_ROWS if LANES == 8 else 0
_BLOCK_COLUMNS = 32  # what a thread takes at a time
_GROUPS_AHEAD = 2  # of _TILE_COLUMNS, when the next weights are fetched

_FLOAT_BYTES = 4
_QUAD = ir.VectorType(FLOAT, 4)

(
    _X,
    _WEIGHT,
    _WEIGHT_BYTES,
    _WEIGHT_BLOCKS,
    _KIND,
    _WIDENED_BYTES,
    _BIAS,
    _Y,
    _ROWS,
    _COLUMNS,
    _INNER,
) = range(FIRST_ARGUMENT, FIRST_ARGUMENT + 11)


def multiply(x: Tensor, weight: Weight, bias: Tensor, y: Tensor) -> Call:
    """x: [rows, inner]; weight: [columns, inner]; bias: [columns]; y: [rows, columns].

    All contiguous float32 on the host, or a compact weight; at least one row and MIN_COLUMNS
    columns.
    """
    columns, inner = weight.shape
    return _multiply.call(
        (columns + _BLOCK_COLUMNS - 1) // _BLOCK_COLUMNS,
        x,
        *row_words(weight),
        widened_bytes(weight, _TILE_COLUMNS),
        bias,
        y,
        len(x),
        columns,
        inner,
    )


class _Function(VectorFunction):
    """With what the ends of rows need: some lanes only, and sums over all lanes."""

    def some(self, address: Any, count: Any) -> Any:
        """The first ``count`` (fewer than LANES) numbers of a vector, zeros behind them."""
        b = self.b
        mask = ir.VectorType(ir.IntType(1), LANES)
        kind = ir.FunctionType(VECTOR, [VECTOR.as_pointer(), I32, mask, VECTOR])
        load = self.declared(f"llvm.masked.load.v{LANES}f32.p0", kind)
        first = b.icmp_signed("<", INTEGERS(list(range(LANES))), self.splat(b.trunc(count, I32)))
        place = b.inttoptr(address, VECTOR.as_pointer())
        return b.call(load, [place, I32(_FLOAT_BYTES), first, ZERO])

    def finish(self, sums: list[Any], bias: Any, y: Any, columns: Any) -> None:
        """A tile's sums and the bias to rows of y."""
        offsets = self.load(bias, _QUAD)
        for r in range(len(sums) // _TILE_COLUMNS):
            result = self.quad_of_sums(sums[r * _TILE_COLUMNS : (r + 1) * _TILE_COLUMNS])
            self.store(self.b.fadd(result, offsets), self.at(y, (columns, r * _FLOAT_BYTES)))

    def quad_of_sums(self, vectors: list[Any]) -> Any:
        """The sums over the lanes of four vectors, as one vector of four."""
        first = self._add_pairs(vectors[0], vectors[1], (0, LANES, 1, LANES + 1), 2)
        second = self._add_pairs(vectors[2], vectors[3], (0, LANES, 1, LANES + 1), 2)
        quads = self._add_pairs(first, second, (0, 1, LANES, LANES + 1), 2)
        width = LANES
        while width > 4:
            width //= 2
            low, high = range(width), range(width, 2 * width)
            quads = self.b.fadd(self.shuffle(quads, quads, low), self.shuffle(quads, quads, high))
        return quads

    def _add_pairs(self, left: Any, right: Any, pattern: tuple[int, ...], step: int) -> Any:
        """left and right interleaved, quad by quad: the lower halves plus the upper ones."""
        low = [quad + lane for quad in range(0, LANES, 4) for lane in pattern]
        high = [lane + step for lane in low]
        return self.b.fadd(self.shuffle(left, right, low), self.shuffle(left, right, high))


def _write_tile(module: Any, rows: int, lines: int) -> Any:
    """(x, weight, bias, y, columns, inner, ahead): rows of x times a tile's rows of the weight.

    Fetches ``lines`` vectors (_TILE_COLUMNS at most), from ``ahead`` on, for each vector of
    the inner dimension.
    """
    f = _Function(module, f"tile_{rows}_{lines}", 7)
    x, weight, bias, y, columns, inner, ahead = f.arguments
    b = f.b
    row_bytes = b.mul(inner, I64(_FLOAT_BYTES))
    x_rows = [f.at(x, (row_bytes, r)) for r in range(rows)]
    weight_rows = [f.at(weight, (row_bytes, c)) for c in range(_TILE_COLUMNS)]

    def added(sums: tuple[Any, ...], load: Callable[[Any], Any]) -> list[Any]:
        """Each sum plus its product at one position of the inner dimension."""
        xs, more = [load(row) for row in x_rows], list(sums)
        for column, row in enumerate(weight_rows):
            weights = load(row)  # one at a time: registers do not suffice for all of them
            for place, numbers in enumerate(xs):
                number = place * _TILE_COLUMNS + column
                more[number] = f.fused(numbers, weights, more[number])
        return more

    def step(position: Any, *sums: Any) -> list[Any]:
        f.fetch(f.at(ahead, (position, lines * _FLOAT_BYTES)), lines * LANES * _FLOAT_BYTES)
        return added(sums, lambda row: f.load(f.at(row, (position, _FLOAT_BYTES))))

    whole = b.and_(inner, I64(-LANES))
    left = b.sub(inner, whole)
    sums = f.loop(whole, LANES, step, *[ZERO] * (rows * _TILE_COLUMNS))
    sums = f.loop(  # once where anything is left
        b.zext(b.icmp_signed(">", left, I64(0)), I64),
        1,
        lambda _, *s: added(s, lambda row: f.some(f.at(row, (whole, _FLOAT_BYTES)), left)),
        *sums,
    )
    f.finish(sums, bias, y, columns)
    return f.end()


def _write_compact_tile(module: Any, rows: int, block_size: int) -> Any:
    """(x, weight, bias, y, columns, inner, weight_bytes, ahead): the same of a compact weight.

    Its numbers are widened in registers, and fetched from ``ahead`` on. The bits are those of
    ``_write_tile`` on what ``widen`` makes of them.
    """
    f = _Function(module, f"compact_tile_{rows}_{block_size}", 8)
    x, weight, bias, y, columns, inner, weight_bytes, ahead = f.arguments
    row_bytes = f.b.mul(inner, I64(_FLOAT_BYTES))
    x_rows = [f.at(x, (row_bytes, r)) for r in range(rows)]
    weight_rows = [f.at(weight, (weight_bytes, c)) for c in range(_TILE_COLUMNS)]
    block_bytes = HEAD_BYTES + block_size

    def step(index: Any, *sums: Any) -> list[Any]:
        fetched = _TILE_COLUMNS * block_bytes
        f.fetch(f.at(ahead, (index, fetched)), fetched)
        more = list(sums)
        for column, row in enumerate(weight_rows):
            block = f.at(row, (index, block_bytes))
            for place, weights in enumerate(widened(f, block, block_size)):
                at = index, block_size * _FLOAT_BYTES
                for r, x_row in enumerate(x_rows):
                    numbers = f.load(f.at(x_row, at, place * LANES * _FLOAT_BYTES))
                    number = r * _TILE_COLUMNS + column
                    more[number] = f.fused(numbers, weights, more[number])
        return more

    num_blocks = f.b.udiv(inner, I64(block_size))
    sums = f.loop(num_blocks, 1, step, *[ZERO] * (rows * _TILE_COLUMNS))
    f.finish(sums, bias, y, columns)
    return f.end()


_FETCHES = _TILE_COLUMNS + 1  # kinds of tiles of the same rows, by what they fetch
_tile: Any = written(_write_tile, *product(range(1, _TILE_ROWS + 1), range(_FETCHES)))
_compact_tile: Any = written(
    _write_compact_tile, *product(range(1, _COMPACT_ROWS + 1), BLOCK_SIZES)
)


def _blocks(task: Any) -> None:
    """Blocks of columns, as long as there are any."""
    rows, columns, inner = task[_ROWS], task[_COLUMNS], task[_INNER]
    row_bytes, weight_bytes = inner * _FLOAT_BYTES, task[_WEIGHT_BYTES]
    num_tiles = (rows + _TILE_ROWS - 1) // _TILE_ROWS
    last = columns - _TILE_COLUMNS
    is_compact = task[_KIND] != AS_THEY_ARE
    # All tiles of a group together fetch a group, evenly, but where widening does.
    lines_of_group = 0 if is_compact else _TILE_COLUMNS
    floats = room(task[_WIDENED_BYTES])
    block = next_item(task)
    while block < task[NUM_ITEMS]:
        # Taken early, because its weights are fetched while the last ones of this are used.
        following = next_item(task)
        begin = block * _BLOCK_COLUMNS
        end = begin + _BLOCK_COLUMNS
        for group in range(begin, min(end, columns), _TILE_COLUMNS):
            column = min(group, last)  # the last group may do some columns again
            weight = task[_WEIGHT] + column * weight_bytes
            bias = task[_BIAS] + column * _FLOAT_BYTES
            fetched = group + _GROUPS_AHEAD * _TILE_COLUMNS
            if fetched >= end:
                fetched += following * _BLOCK_COLUMNS - end
            ahead = task[_WEIGHT] + min(fetched, last) * weight_bytes
            if is_compact and rows <= _MOST_COMPACT_ROWS:
                kind = (rows - 1) * len(BLOCK_SIZES) + task[_KIND]
                y = task[_Y] + column * _FLOAT_BYTES
                _compact_tile(kind, task[_X], weight, bias, y, columns, inner, weight_bytes, ahead)
                continue
            if is_compact:
                num_blocks = _TILE_COLUMNS * task[_WEIGHT_BLOCKS]
                widen(task[_KIND], weight, num_blocks, floats, ahead)
                weight = floats
            row = 0
            for tile in range(num_tiles):
                end_row = rows * (tile + 1) // num_tiles
                lines = lines_of_group * (tile + 1) // num_tiles
                lines -= lines_of_group * tile // num_tiles
                x = task[_X] + row * row_bytes
                y = task[_Y] + (row * columns + column) * _FLOAT_BYTES
                kind = (end_row - row - 1) * _FETCHES + lines
                _tile(kind, x, weight, bias, y, columns, inner, ahead)
                ahead += lines * row_bytes
                row = end_row
        block = following


# Sums may not be reordered: each kind of tile would get an order of its own.
_multiply = Loop(_blocks, {"error_model": "numpy"})
