"""``y = x @ weight.T + bias`` in float32 for many rows of x, in vector registers.

What bounds a product of many rows is arithmetic. torch's own reads a plain weight
against the grain and reaches two thirds of what the processor can; oneDNN's packed
one is fast, but keeps a second copy of the weight. Here each thread packs as many
panels of the weight as stay in its cache, transposed, into memory of its own, and
multiplies them with one block of rows of x after another (Goto and van de Geijn,
"Anatomy of high-performance matrix multiplication", 2008). x is read as it lies: a number of
it is wanted in all lanes, so that it need not lie beside others. Of a compact weight the rows
that are packed next are widened first.
A block of rows times a panel of two vectors is kept in registers.

Each number of y is summed in one order, whatever the other rows
are, how many they are, and how many threads there are. Needs AVX-512, or AVX2 with FMA.
"""

from typing import Any

from numba import njit
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
from diptych.engine.backends.cpu.kernels.processor import HAS_FMA, LANES
from diptych.engine.backends.cpu.kernels.scratch import OfThread, Scratch, group_of
from diptych.engine.backends.cpu.kernels.vector_function import (
    FLOAT,
    ZERO,
    VectorFunction,
    written,
)
from diptych.engine.model.compact import Weight
from diptych.engine.model.layer_config import Activation

SUPPORTED = HAS_FMA
_VECTOR_BYTES = LANES * 4
_PANEL_VECTORS = 2
PANEL = _PANEL_VECTORS * LANES  # columns that are multiplied at a time
_BLOCK = 14 if LANES == 16 else 6  # rows; with the operands, this fills the registers
_FEWEST = _BLOCK - 2  # rows of a block; all blocks of a product are about alike
# From here on, as many blocks as are needed have so many rows at the least.
MIN_ROWS = (_FEWEST // 2) * _BLOCK + 1
_UNROLLED = 4  # of the inner dimension
_LINE = 16  # numbers
_WAY_BYTES = 1 << 12  # of the nearest cache: what lies so far apart shares a place
_SPAN = 128  # of the inner dimension: what is summed in registers
_PART = 5 * _SPAN  # of the inner dimension, about: what of a panel is in cache at a time
_TAKEN_BYTES = _BLOCK * _SPAN * 4  # of a block of x: a span of each row, one behind the other
_SUMS_BYTES = _BLOCK * _PANEL_VECTORS * _VECTOR_BYTES
_CACHED_BYTES = 1 << 19  # of packed panels, half of the second level of cache


class WideScratch(Scratch):
    """See :class:`Scratch`: each thread's panels, packed; x is read where it is."""

    def calls(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor,
        y: Tensor,
        activation: Activation | None = None,
    ) -> list[Call]:
        """What computes y: [rows, columns] from x: [rows, inner], weight: [columns, inner].

        bias: [columns]. All contiguous float32 on the host, or a compact weight; MIN_ROWS rows
        or more; a weight that is_taken. With an activation the weight's rows are those of the
        gates, then those of what they are for, and y: [rows, columns / 2] their product.
        """
        rows, (columns, inner) = y.shape[0], (y.shape[1], x.shape[1])
        width = PANEL if activation is None else LANES
        apart = LANES if activation is None else columns
        num_blocks, num_panels = -(-rows // _BLOCK), -(-columns // width)
        num_parts = 1 if inner % _SPAN else -(-inner // _PART)
        part = inner if num_parts == 1 else -(-inner // (num_parts * _SPAN)) * _SPAN
        panel_bytes = part * PANEL * 4
        num_groups = self.num_groups(num_panels, max(1, _CACHED_BYTES // panel_bytes))
        widened = widened_bytes(weight, LANES)
        per_group = -(-num_panels // num_groups)
        sums_bytes = per_group * _SUMS_BYTES * (num_blocks if num_parts > 1 else 1)
        thread_bytes = sums_bytes + _TAKEN_BYTES + widened + per_group * panel_bytes
        self.make_room(0, thread_bytes)
        return [
            _multiply.call(
                num_groups,
                *row_words(weight),
                widened,
                bias,
                y,
                rows,
                columns,
                width,
                apart,
                _ENDS.index(activation),
                inner,
                x,
                self.panels,
                thread_bytes,
                self.num_threads,
                self.num_taken,
                part,
                per_group,
                sums_bytes,
            ),
        ]


scratch = OfThread(WideScratch)


def is_taken(columns: int, inner: int) -> bool:
    """Whether the kernel multiplies with a weight of this shape."""
    return columns >= PANEL and inner > 0 and inner % LANES == 0


def _write_pack(module: Any) -> Any:
    """(first of LANES rows, bytes of one, steps, where to, bytes apart).

    Transposed: a vector for each number of the inner dimension, its lanes being rows.
    """
    f = VectorFunction(module, "pack", 5)
    first, row_bytes, num_steps, target, apart = f.arguments
    rows = [f.at(first, (row_bytes, number)) for number in range(LANES)]

    def step(index: Any) -> None:
        loaded = [f.load(f.at(row, (index, 4))) for row in rows]
        place = f.at(target, (index, apart))
        for number, vector in enumerate(f.transposed(loaded)):
            f.store(vector, f.at(place, (apart, number)))

    f.loop(num_steps, LANES, step)
    return f.end()


def _write_take(module: Any, rows: int) -> Any:
    """(first of the rows of x, bytes of one, steps, where to): a span of each.

    Where they lie in x they would push each other out of the nearest cache.
    """
    f = VectorFunction(module, f"take_{rows}", 4)
    x, row_bytes, num_steps, target = f.arguments

    def step(index: Any) -> None:
        for row in range(rows):
            value = f.load(f.at(x, (row_bytes, row), (index, 4)))
            f.store(value, f.at(target, row * _SPAN * 4, (index, 4)))

    f.loop(num_steps, LANES, step)
    return f.end()


def _write_approach(module: Any) -> Any:
    """(place in a row of x, steps): that so much of it will be taken soon."""
    f = VectorFunction(module, "approach", 2)
    x, num_steps = f.arguments
    f.loop(num_steps, _LINE, lambda index: f.fetch(f.at(x, (index, 4)), 1))
    return f.end()


def _write_multiply(module: Any, rows: int, more: bool) -> Any:
    """(first of the rows of x, bytes of one, panel, steps, sums): products, or more for the sums.

    Sums are in memory so that they are short ones of short ones, which lose less.
    """
    f = VectorFunction(module, f"multiply_{rows}_{int(more)}", 5)
    x, row_bytes, panel, num_steps, sums = f.arguments
    places = _places(rows)
    x_rows = [f.at(x, (row_bytes, row)) for row in range(rows)]

    def step(index: Any, *totals: Any) -> list[Any]:
        at_panel = f.at(panel, (index, PANEL * 4))
        added = list(totals)
        for number in range(_UNROLLED):
            here = f.at(at_panel, number * PANEL * 4)
            weights = [f.load(f.at(here, v * _VECTOR_BYTES)) for v in range(_PANEL_VECTORS)]
            for place, (r, v) in enumerate(places):
                if v == 0:
                    element = f.splat(f.load(f.at(x_rows[r], (index, 4), number * 4), FLOAT))
                added[place] = f.fused(element, weights[v], added[place])
        return added

    totals = f.loop(num_steps, _UNROLLED, step, *[ZERO] * len(places))
    for place, total in enumerate(totals):
        memory = f.at(sums, place * _VECTOR_BYTES)
        f.store(f.b.fadd(f.load(memory), total) if more else total, memory)
    return f.end()


def _write_expect(module: Any, rows: int) -> Any:
    """(where to, bytes of a row of y): that a panel of these rows will be written there soon."""
    f = VectorFunction(module, f"expect_{rows}", 2)
    y, row_bytes = f.arguments
    for row in range(rows):
        f.fetch(f.at(y, (row_bytes, row)), PANEL * 4, to_write=True)
    return f.end()


def _write_finish(module: Any, rows: int, activation: Activation | None) -> Any:
    """(sums, bias, bytes to the second vector's, where to, bytes of a row of y).

    The sums and the bias, or gates (the first vector) and what they are for.
    """
    name = "plain" if activation is None else activation.value
    f = VectorFunction(module, f"finish_{name}_{rows}", 5)
    sums, bias, apart, y, row_bytes = f.arguments
    offsets = [f.load(f.at(bias, (apart, v))) for v in range(_PANEL_VECTORS)]
    for row in range(rows):
        memory = f.at(sums, row * PANEL * 4)
        place = f.at(y, (row_bytes, row))
        both = [
            f.b.fadd(f.load(f.at(memory, v * _VECTOR_BYTES)), offset)
            for v, offset in enumerate(offsets)
        ]
        results = both if activation is None else [_gated(f, activation, *both)]
        for v, result in enumerate(results):
            f.store(result, f.at(place, v * _VECTOR_BYTES))
    return f.end()


def _gated(f: VectorFunction, activation: Activation, gate: Any, up: Any) -> Any:
    """activation(gate) * up."""
    s = gate
    if activation is Activation.GELU_TANH:
        # 2 sqrt(2 / pi), as (1 + tanh(z)) / 2 = sigmoid(2 z)
        cube = f.b.fmul(gate, f.b.fmul(gate, gate))
        s = f.b.fmul(
            f.splat(FLOAT(1.5957691)), f.plus_product(gate, f.splat(FLOAT(0.044715)), cube)
        )
    under = f.b.fadd(f.splat(FLOAT(1.0)), f.exp(f.b.fneg(s)))
    return f.b.fdiv(f.b.fmul(gate, up), under)


def _places(rows: int) -> list[tuple[int, int]]:
    """Row and vector of each sum of a block of rows and a panel."""
    return [(row, vector) for row in range(rows) for vector in range(_PANEL_VECTORS)]


_ENDS = (None, *Activation)
_NUM_HEIGHTS = 3
_HEIGHTS = [(_FEWEST + i,) for i in range(_NUM_HEIGHTS)]
_pack: Any = written(_write_pack)
_take_rows: Any = written(_write_take, *_HEIGHTS)
_approach: Any = written(_write_approach)
_multiply_rows: Any = written(
    _write_multiply, *[(*height, m) for m in (False, True) for height in _HEIGHTS]
)
_expect_rows: Any = written(_write_expect, *_HEIGHTS)
_finish_rows: Any = written(_write_finish, *[(*height, e) for e in _ENDS for height in _HEIGHTS])

(
    _WEIGHT,
    _WEIGHT_BYTES,
    _WEIGHT_BLOCKS,
    _KIND,
    _WIDENED_BYTES,
    _BIAS,
    _Y,
    _ROWS,
    _COLUMNS,
    _WIDTH,
    _APART,
    _END,
    _INNER,
    _X,
    _PANELS,
    _THREAD_BYTES,
    _NUM_THREADS,
    _NUM_TAKEN,
    _PART_LENGTH,
    _PANELS_PER_GROUP,
    _ALL_SUMS_BYTES,
) = range(FIRST_ARGUMENT, FIRST_ARGUMENT + 21)


def _products(task: Any) -> None:
    """Groups of panels of the weight with all blocks of x, as long as there are any."""
    num_panels = (task[_COLUMNS] + task[_WIDTH] - 1) // task[_WIDTH]
    num_blocks = (task[_ROWS] + _BLOCK - 1) // _BLOCK
    # Numbers that follow each other: different ones for all threads of one call.
    number = next_item(words_at(task[_NUM_TAKEN])) % task[_NUM_THREADS]
    sums = task[_PANELS] + number * task[_THREAD_BYTES]
    widened = sums + task[_ALL_SUMS_BYTES] + _TAKEN_BYTES
    panels = widened + task[_WIDENED_BYTES]
    item = next_item(task)
    while item < task[NUM_ITEMS]:
        first, end = group_of(num_panels, task[NUM_ITEMS], item)
        for begin in range(0, task[_INNER], task[_PART_LENGTH]):
            for panel in range(first, end):
                target = panels + (panel - first) * task[_PART_LENGTH] * PANEL * 4
                _pack_panel(task, panel, begin, widened, target)
            for block in range(num_blocks):
                _multiply_block(task, block, num_blocks, begin, first, end, panels, sums)
        item = next_item(task)


@njit(error_model="numpy")
def _column(task: Any, panel: int) -> int:
    """Of y, the first of a panel; the last panel may do some columns again."""
    column: int = min(panel * task[_WIDTH], task[_COLUMNS] - task[_WIDTH])
    return column


@njit(error_model="numpy")
def _pack_panel(task: Any, panel: int, begin: int, widened: int, target: int) -> None:
    """A part of one panel of the weight. widened: room for a vector's columns of a compact one."""
    inner, weight_bytes = task[_INNER], task[_WEIGHT_BYTES]
    length = min(task[_PART_LENGTH], inner - begin)
    weight = task[_WEIGHT] + _column(task, panel) * weight_bytes
    for half in range(_PANEL_VECTORS):
        rows, row_bytes = weight + half * task[_APART] * weight_bytes + begin * 4, inner * 4
        if task[_KIND] != AS_THEY_ARE:
            rows -= begin * 4
            _widen_rows(task, rows, begin, length, widened)
            rows, row_bytes = widened, length * 4
        place = target + half * _VECTOR_BYTES
        _pack(rows, row_bytes, length, place, _PANEL_VECTORS * _VECTOR_BYTES)


@njit(error_model="numpy")
def _widen_rows(task: Any, rows: int, begin: int, length: int, widened: int) -> None:
    """A part of LANES rows of a compact weight, and soon of those behind them."""
    kind, weight_bytes, num_blocks = task[_KIND], task[_WEIGHT_BYTES], task[_WEIGHT_BLOCKS]
    # Whole rows are widened in one go; parts of them are as many blocks as are widened at a time.
    num_times, num_together = 1, LANES * num_blocks
    if length < task[_INNER]:
        num_times, num_together = LANES, length * num_blocks // task[_INNER]
        rows += begin * num_blocks // task[_INNER] * (weight_bytes // num_blocks)
    for row in range(num_times):
        at_row = rows + row * weight_bytes
        following = at_row + LANES * weight_bytes
        widen(kind, at_row, num_together, widened + row * length * 4, following)


@njit(error_model="numpy")
def _multiply_block(
    task: Any, block: int, num_blocks: int, begin: int, first: int, end: int, panels: int, sums: int
) -> None:
    """A part of one block of x with the same of a group of panels, from ``first`` to ``end``."""
    inner, columns, part = task[_INNER], task[_COLUMNS], task[_PART_LENGTH]
    row = block * task[_ROWS] // num_blocks
    num_rows = (block + 1) * task[_ROWS] // num_blocks - row
    height, row_bytes = num_rows - _FEWEST, inner * 4
    x, y = task[_X] + row * row_bytes, task[_Y] + row * columns * 4
    taken = sums + task[_ALL_SUMS_BYTES]
    if part < inner:
        sums += block * (end - first) * _SUMS_BYTES
    stop = min(begin + part, inner)
    for at in range(begin, stop, _SPAN):
        steps, at_x = min(_SPAN, stop - at), x + at * 4
        near, near_bytes = at_x, row_bytes
        if row_bytes % _WAY_BYTES == 0:
            near, near_bytes = taken, _SPAN * 4
            _take_rows(height, at_x, row_bytes, steps, taken)
        following = at_x + _SPAN * 4 if at + _SPAN < stop else x + num_rows * row_bytes + begin * 4
        for panel in range(first, end):
            packed = panels + ((panel - first) * part + at - begin) * PANEL * 4
            for number in range(panel - first, num_rows, end - first):
                _approach(following + number * row_bytes, min(_SPAN, inner))
            column, place = _column(task, panel), sums + (panel - first) * _SUMS_BYTES
            if at + steps == inner:
                _expect_rows(height, y + column * 4, columns * 4)
            more = min(at, 1) * _NUM_HEIGHTS
            _multiply_rows(more + height, near, near_bytes, packed, steps, place)
            if at + steps == inner:
                end_of = task[_END] * _NUM_HEIGHTS
                bias, apart = task[_BIAS] + column * 4, task[_APART] * 4
                _finish_rows(end_of + height, place, bias, apart, y + column * 4, columns * 4)


# Sums may not be reordered.
_multiply = Loop(_products, {"error_model": "numpy"})
