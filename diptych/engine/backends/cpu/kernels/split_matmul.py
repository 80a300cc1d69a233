"""``y = x @ weight.T + bias`` in float32 for many rows of x, on the processor's matrix unit.

AMX multiplies bfloat16 sixteen times as fast as AVX-512 multiplies float32. A float32
is exactly the sum of three bfloat16 numbers, its high, middle and low eight bits, so a
product is the sum of nine products of parts. Six are taken; the other three are below
2**-23 of the whole, where float32 rounds anyway. (Henry, Tang and Heinecke, "Leveraging
the bfloat16 artificial intelligence datatype for higher-precision computations", 2019.)

x is split once, into blocks of 32 rows. Then each thread takes as many panels, 32 rows of
the weight each, as stay in its cache, splits them into memory of its own, and multiplies
them with one block of x after another. Sums are kept in four tiles, float32. Of a
compact weight a panel is widened before it is split.

A row's result has the same bits whatever the other rows are, how many they are, and how
many threads there are. Only where :func:`matrix_unit.is_lent`: elsewhere it does not compile.
"""

from typing import Any

from llvmlite import ir
from torch import Tensor

from diptych.engine.backends.cpu.kernels.compact_rows import (
    AS_THEY_ARE,
    row_words,
    widen,
    widened_bytes,
)
from diptych.engine.backends.cpu.kernels.loop import (
    FIRST_ARGUMENT,
    NUM_ITEMS,
    Call,
    Loop,
    next_item,
    words_at,
)
from diptych.engine.backends.cpu.kernels.matrix_unit import TILE_ROW_BYTES, TILE_ROWS, tile_shapes
from diptych.engine.backends.cpu.kernels.processor import LANES
from diptych.engine.backends.cpu.kernels.scratch import OfThread, Scratch
from diptych.engine.backends.cpu.kernels.vector_function import (
    I8,
    I16,
    I32,
    I64,
    INTEGERS,
    VECTOR,
    VectorFunction,
    written,
)
from diptych.engine.model.compact import Weight

BLOCK = 32  # rows of x, and rows of the weight, that are multiplied at a time: two tiles
STEP = 32  # of the inner dimension: one row of a tile
_TILE_BYTES = TILE_ROWS * TILE_ROW_BYTES
_PARTS = 3
_HIGH, _MIDDLE, _LOW = range(_PARTS)
# (part of the weight, part of x): small products first, and from one to the next one part stays.
_PRODUCTS = (
    (_HIGH, _LOW),
    (_HIGH, _MIDDLE),
    (_MIDDLE, _MIDDLE),
    (_MIDDLE, _HIGH),
    (_HIGH, _HIGH),
    (_LOW, _HIGH),
)
_PART_BYTES = 2 * _TILE_BYTES
_STEP_BYTES = _PARTS * _PART_BYTES  # of one step of a block, split
_SUMS_BYTES = 4 * _TILE_BYTES
_CACHED_BYTES = 1 << 20  # of split panels, half of the second level of cache
_LINE_BYTES = 64


class SplitScratch(Scratch):
    """See :class:`Scratch`: x split, and each thread's panels, split."""

    def calls(self, x: Tensor, weight: Weight, bias: Tensor, y: Tensor) -> list[Call]:
        """What computes y: [rows, columns] from x: [rows, inner], weight: [columns, inner].

        bias: [columns]. All contiguous float32 on the host, or a compact weight; at least one
        row; a weight that is_taken.
        """
        rows, (columns, inner) = len(x), weight.shape
        num_panels = -(-columns // BLOCK)
        most = max(1, _CACHED_BYTES // _split_bytes(BLOCK, inner))
        group = -(-num_panels // self.num_groups(num_panels, most))
        widened = widened_bytes(weight, BLOCK)
        thread_bytes = _split_bytes(group * BLOCK, inner) + _SUMS_BYTES + widened
        self.make_room(_split_bytes(rows, inner), thread_bytes)
        return [
            _split_x.call(-(-rows // BLOCK), x, rows, inner, self.x),
            _multiply.call(
                -(-num_panels // group),
                *row_words(weight),
                bias,
                y,
                rows,
                columns,
                inner,
                self.x,
                group,
                self.panels,
                thread_bytes,
                self.num_threads,
                self.num_taken,
                tile_shapes(),
            ),
        ]


scratch = OfThread(SplitScratch)


def is_taken(columns: int, inner: int) -> bool:
    """Whether the kernel multiplies with a weight of this shape."""
    return columns >= BLOCK and inner > 0 and inner % STEP == 0


def _split_bytes(rows: int, inner: int) -> int:
    """What ``rows`` rows take when they are split."""
    return -(-rows // BLOCK) * (inner // STEP) * _STEP_BYTES


class _Function(VectorFunction):
    """With what splitting, transposing and tiles need."""

    def split(self, vector: Any) -> list[Any]:
        """The three parts of each number, each in the upper half of its lane."""
        b, parts = self.b, []
        mask = INTEGERS([-(1 << 16)] * LANES)
        for _ in range(_PARTS):
            part = b.and_(b.bitcast(vector, INTEGERS), mask)
            parts.append(part)
            vector = b.fsub(vector, b.bitcast(part, VECTOR))
        return parts

    def upper_halves(self, left: Any, right: Any) -> Any:
        """The upper halves of all lanes of two vectors, one after another."""
        halves = ir.VectorType(I16, 2 * LANES)
        chosen = ir.VectorType(I32, 2 * LANES)(list(range(1, 4 * LANES, 2)))
        left, right = (self.b.bitcast(vector, halves) for vector in (left, right))
        return self.b.bitcast(self.b.shuffle_vector(left, right, chosen), INTEGERS)

    def tile(self, instruction: str, *arguments: Any) -> None:
        """An instruction of the matrix unit. Tiles are numbers from 0 to 7."""
        types_ = [a.type if isinstance(a, ir.Value) else I8 for a in arguments]
        values = [a if isinstance(a, ir.Value) else I8(a) for a in arguments]
        kind = ir.FunctionType(ir.VoidType(), types_)
        self.b.call(self.declared(f"llvm.x86.{instruction}", kind), values)

    def move_tile(self, instruction: str, tile: int, address: Any) -> None:
        place = self.b.inttoptr(address, I8.as_pointer())
        self.tile(instruction, tile, place, I64(TILE_ROW_BYTES))


def _write_begin(module: Any) -> Any:
    """(shapes): the unit is configured for this thread."""
    f = _Function(module, "begin_tiles", 1)
    f.tile("ldtilecfg", f.b.inttoptr(f.arguments[0], I8.as_pointer()))
    return f.end()


def _write_end(module: Any) -> Any:
    """(): this thread needs the unit no more."""
    f = _Function(module, "end_tiles", 0)
    f.tile("tilerelease")
    return f.end()


def _write_split_block(module: Any) -> Any:
    """(first of BLOCK rows of x, the last that there is, bytes of one, steps, where to): split."""
    f = _Function(module, "split_block", 5)
    x, last, row_bytes, num_steps, target = f.arguments

    def rows(half: Any) -> list[Any]:
        numbers = [f.at(half, r) for r in range(TILE_ROWS)]
        kept = [f.b.select(f.b.icmp_signed("<", n, last), n, last) for n in numbers]
        return [f.at(x, (number, row_bytes)) for number in kept]

    def half(first: Any) -> None:
        addresses = rows(first)

        def step(index: Any) -> None:
            offset = f.at(I64(0), (index, STEP * 4))
            pairs = [
                [f.split(f.load(f.at(a, offset, more))) for more in (0, LANES * 4)]
                for a in addresses
            ]
            for part in range(_PARTS):
                packed = [f.upper_halves(left[part], right[part]) for left, right in pairs]
                place = f.at(target, (index, _STEP_BYTES), (first, TILE_ROW_BYTES))
                for number, row in enumerate(f.transposed(packed)):
                    offset = part * _PART_BYTES + number * TILE_ROW_BYTES
                    f.store(row, f.at(place, offset))

        f.loop(num_steps, 1, step)

    f.loop(I64(BLOCK), TILE_ROWS, half)
    return f.end()


def _write_split_panel(module: Any) -> Any:
    """(first of BLOCK rows of the weight, bytes of one, steps, where to): split."""
    f = _Function(module, "split_panel", 4)
    weight, row_bytes, num_steps, target = f.arguments

    def row(number: Any) -> None:
        address = f.at(weight, (number, row_bytes))
        place = f.at(target, (number, TILE_ROW_BYTES))

        def step(index: Any) -> None:
            source = f.at(address, (index, STEP * 4))
            left, right = (f.split(f.load(f.at(source, more))) for more in (0, LANES * 4))
            for part in range(_PARTS):
                packed = f.upper_halves(left[part], right[part])
                f.store(packed, f.at(place, (index, _STEP_BYTES), part * _PART_BYTES))

        f.loop(num_steps, 1, step)

    f.loop(I64(BLOCK), 1, row)
    return f.end()


def _write_multiply_block(module: Any) -> Any:
    """(split weight, split x, steps, where to, what to fetch, lines in each step): the sums.

    A tile [weight, x] for each half of each.
    """
    f = _Function(module, "multiply_block", 6)
    weight, x, num_steps, sums, ahead, lines = f.arguments
    weight_tiles, x_tiles = (4, 5), (6, 7)
    for tile in range(4):
        f.tile("tilezero", tile)

    def load(tiles: tuple[int, int], begin: Any, part: int) -> None:
        for half, tile in enumerate(tiles):
            offset = part * _PART_BYTES + half * _TILE_BYTES
            f.move_tile("tileloadd64", tile, f.at(begin, offset))

    def step(index: Any) -> None:
        at_weight, at_x = (f.at(begin, (index, _STEP_BYTES)) for begin in (weight, x))
        begin = f.at(ahead, (f.b.mul(index, lines), _LINE_BYTES))
        f.loop(lines, 1, lambda line: f.fetch(f.at(begin, (line, _LINE_BYTES)), 1))
        before = (-1, -1)
        for weight_part, x_part in _PRODUCTS:
            if weight_part != before[0]:
                load(weight_tiles, at_weight, weight_part)
            if x_part != before[1]:
                load(x_tiles, at_x, x_part)
            before = (weight_part, x_part)
            for tile in range(4):
                f.tile("tdpbf16ps", tile, weight_tiles[tile // 2], x_tiles[tile % 2])

    f.loop(num_steps, 1, step)
    for tile in range(4):
        f.move_tile("tilestored64", tile, f.at(sums, tile * _TILE_BYTES))
    return f.end()


def _write_give(module: Any) -> Any:
    """(sums, bias, first of BLOCK rows of y, the last that there is, bytes of one): y."""
    f = _Function(module, "give", 5)
    sums, bias, y, last, row_bytes = f.arguments
    for columns in range(2):
        offsets = f.load(f.at(bias, columns * TILE_ROW_BYTES))
        for rows in range(2):
            tile = f.at(sums, (2 * columns + rows) * _TILE_BYTES)
            loaded = [f.load(f.at(tile, r * TILE_ROW_BYTES)) for r in range(TILE_ROWS)]
            for r, row in enumerate(f.transposed(loaded)):
                number = I64(rows * TILE_ROWS + r)
                # Behind the last row it counts again.
                number = f.b.select(f.b.icmp_signed("<", number, last), number, last)
                place = f.at(y, (number, row_bytes), columns * TILE_ROW_BYTES)
                f.store(f.b.fadd(row, offsets), place)
    return f.end()


_begin: Any = written(_write_begin)
_end: Any = written(_write_end)
_split_block: Any = written(_write_split_block)
_split_panel: Any = written(_write_split_panel)
_multiply_block: Any = written(_write_multiply_block)
_give: Any = written(_write_give)

_X, _X_ROWS, _X_INNER, _X_SPLIT = range(FIRST_ARGUMENT, FIRST_ARGUMENT + 4)


def _split_blocks(task: Any) -> None:
    """Blocks of x, as long as there are any."""
    rows, inner = task[_X_ROWS], task[_X_INNER]
    num_steps = inner // STEP
    item = next_item(task)
    while item < task[NUM_ITEMS]:
        first = item * BLOCK
        target = task[_X_SPLIT] + item * num_steps * _STEP_BYTES
        x = task[_X] + first * inner * 4
        _split_block(x, rows - 1 - first, inner * 4, num_steps, target)
        item = next_item(task)


(
    _WEIGHT,
    _WEIGHT_BYTES,
    _WEIGHT_BLOCKS,
    _KIND,
    _BIAS,
    _Y,
    _ROWS,
    _COLUMNS,
    _INNER,
    _SPLIT,
    _GROUP,
    _PANELS,
    _THREAD_BYTES,
    _NUM_THREADS,
    _NUM_TAKEN,
    _SHAPES,
) = range(FIRST_ARGUMENT, FIRST_ARGUMENT + 16)


def _products(task: Any) -> None:
    """Groups of panels of the weight with all blocks of x, as long as there are any."""
    rows, columns, inner, group = task[_ROWS], task[_COLUMNS], task[_INNER], task[_GROUP]
    num_steps, num_panels = inner // STEP, (columns + BLOCK - 1) // BLOCK
    num_blocks = (rows + BLOCK - 1) // BLOCK
    block_bytes = num_steps * _STEP_BYTES
    # Numbers that follow each other: different ones for all threads of one call.
    number = next_item(words_at(task[_NUM_TAKEN])) % task[_NUM_THREADS]
    panels = task[_PANELS] + number * task[_THREAD_BYTES]
    sums = panels + group * block_bytes
    widened, weight_bytes = sums + _SUMS_BYTES, task[_WEIGHT_BYTES]
    # All panels of a group together fetch the next block of x.
    lines = (_STEP_BYTES // _LINE_BYTES + group - 1) // group
    _begin(task[_SHAPES])
    item = next_item(task)
    while item < task[NUM_ITEMS]:
        first = item * group
        end = min(first + group, num_panels)
        for panel in range(first, end):
            weight = task[_WEIGHT] + min(panel * BLOCK, columns - BLOCK) * weight_bytes
            if task[_KIND] != AS_THEY_ARE:
                following = weight + BLOCK * weight_bytes
                widen(task[_KIND], weight, BLOCK * task[_WEIGHT_BLOCKS], widened, following)
                weight = widened
            _split_panel(weight, inner * 4, num_steps, panels + (panel - first) * block_bytes)
        for block in range(num_blocks):
            row = block * BLOCK
            x = task[_SPLIT] + block * block_bytes
            ahead = task[_SPLIT] + (block + 1) % num_blocks * block_bytes
            for panel in range(first, end):
                split = panels + (panel - first) * block_bytes
                _multiply_block(split, x, num_steps, sums, ahead, lines)
                ahead += lines * num_steps * _LINE_BYTES
                # The last panel may do some columns again.
                column = min(panel * BLOCK, columns - BLOCK)
                y = task[_Y] + (row * columns + column) * 4
                _give(sums, task[_BIAS] + column * 4, y, rows - 1 - row, columns * 4)
        item = next_item(task)
    _end()


# Sums may not be reordered, and a part is what is left of a number without another.
_split_x = Loop(_split_blocks, {"error_model": "numpy"})
_multiply = Loop(_products, {"error_model": "numpy"})
