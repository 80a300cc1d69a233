"""``y = x @ weight.T + bias`` in float32 for many rows of x, in vector registers.

What bounds a product of many rows is arithmetic. torch's own reads a plain weight
against the grain and reaches two thirds of what the processor can; oneDNN's packed
one is fast, but keeps a second copy of the weight. Here each thread packs as many
panels of the weight as stay in its cache, transposed, into memory of its own, and
multiplies them with one block of x after another, also packed, once per product
(Goto and van de Geijn, "Anatomy of high-performance matrix multiplication", 2008). Of a
compact weight the rows that are packed next are widened first.
A block of rows times a panel of two vectors is kept in registers.

Each number of y is summed in one order, whatever the other rows
are, how many they are, and how many threads there are. Needs AVX-512, or AVX2 with FMA.
"""

from typing import Any

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
from diptych.engine.backends.cpu.kernels.scratch import OfThread, Scratch
from diptych.engine.backends.cpu.kernels.vector_function import (
    FLOAT,
    I64,
    ZERO,
    VectorFunction,
    written,
)
from diptych.engine.model.compact import Weight

SUPPORTED = HAS_FMA
_VECTOR_BYTES = LANES * 4
_PANEL_VECTORS = 2
PANEL = _PANEL_VECTORS * LANES  # columns that are multiplied at a time
_BLOCK = 14 if LANES == 16 else 6  # rows; with the operands, this fills the registers
_FEWEST = _BLOCK - 2  # rows of a block; all blocks of a product are about alike
# From here on, as many blocks as are needed have so many rows at the least.
MIN_ROWS = (_FEWEST // 2) * _BLOCK + 1
_UNROLLED = 4  # of the inner dimension
_SPAN = 128  # of the inner dimension: what is summed in registers
_SUMS_BYTES = _BLOCK * _PANEL_VECTORS * _VECTOR_BYTES
_CACHED_BYTES = 1 << 19  # of packed panels, half of the second level of cache


class WideScratch(Scratch):
    """See :class:`Scratch`: x packed, and each thread's panels, packed."""

    def calls(self, x: Tensor, weight: Weight, bias: Tensor, y: Tensor) -> list[Call]:
        """What computes y: [rows, columns] from x: [rows, inner], weight: [columns, inner].

        bias: [columns]. All contiguous float32 on the host, or a compact weight; MIN_ROWS rows
        or more; a weight that is_taken.
        """
        rows, (columns, inner) = len(x), weight.shape
        num_blocks, num_panels = -(-rows // _BLOCK), -(-columns // PANEL)
        panel_bytes = inner * PANEL * 4
        num_groups = self.num_groups(num_panels, max(1, _CACHED_BYTES // panel_bytes))
        widened = widened_bytes(weight, LANES)
        thread_bytes = _SUMS_BYTES + widened + -(-num_panels // num_groups) * panel_bytes
        self.make_room(num_blocks * inner * _VECTOR_BYTES, thread_bytes)
        return [
            _pack_x.call(num_blocks, x, rows, inner, self.x),
            _multiply.call(
                num_groups,
                *row_words(weight),
                widened,
                bias,
                y,
                rows,
                columns,
                inner,
                self.x,
                self.panels,
                thread_bytes,
                self.num_threads,
                self.num_taken,
            ),
        ]


scratch = OfThread(WideScratch)


def is_taken(columns: int, inner: int) -> bool:
    """Whether the kernel multiplies with a weight of this shape."""
    return columns >= PANEL and inner > 0 and inner % LANES == 0


def _write_pack(module: Any) -> Any:
    """(first of LANES rows, the last that there is, bytes of one, steps, where to, bytes apart).

    Transposed: a vector for each number of the inner dimension, its lanes being rows.
    """
    f = VectorFunction(module, "pack", 6)
    first, last, row_bytes, num_steps, target, apart = f.arguments
    numbers = [I64(r) for r in range(LANES)]
    kept = [f.b.select(f.b.icmp_signed("<", n, last), n, last) for n in numbers]
    rows = [f.at(first, (number, row_bytes)) for number in kept]

    def step(index: Any) -> None:
        loaded = [f.load(f.at(row, (index, 4))) for row in rows]
        place = f.at(target, (index, apart))
        for number, vector in enumerate(f.transposed(loaded)):
            f.store(vector, f.at(place, (apart, number)))

    f.loop(num_steps, LANES, step)
    return f.end()


def _write_multiply(module: Any, rows: int) -> Any:
    """(packed x, panel, steps, bias, where to, bytes of a row of y, sums): rows of a panel.

    ``sums`` is memory for what the spans add up to: short sums of short sums lose less.
    """
    f = VectorFunction(module, f"multiply_{rows}", 7)
    x, panel, num_steps, bias, y, row_bytes, sums = f.arguments
    places = [(r, v) for r in range(rows) for v in range(_PANEL_VECTORS)]

    def step(index: Any, begin: Any, totals: tuple[Any, ...]) -> list[Any]:
        at_x = f.at(x, (f.b.add(begin, index), _VECTOR_BYTES))
        at_panel = f.at(panel, (f.b.add(begin, index), PANEL * 4))
        added = list(totals)
        for number in range(_UNROLLED):
            here = f.at(at_panel, number * PANEL * 4)
            weights = [f.load(f.at(here, v * _VECTOR_BYTES)) for v in range(_PANEL_VECTORS)]
            for place, (r, v) in enumerate(places):
                if v == 0:
                    element = f.splat(f.load(f.at(at_x, number * _VECTOR_BYTES + r * 4), FLOAT))
                added[place] = f.fused(element, weights[v], added[place])
        return added

    def span(begin: Any) -> None:
        left = f.b.sub(num_steps, begin)
        length = f.b.select(f.b.icmp_signed("<", left, I64(_SPAN)), left, I64(_SPAN))
        totals = f.loop(length, _UNROLLED, lambda i, *t: step(i, begin, t), *[ZERO] * len(places))
        for place, total in enumerate(totals):
            memory = f.at(sums, place * _VECTOR_BYTES)
            f.store(f.b.fadd(f.load(memory), total), memory)

    for place in range(len(places)):
        f.store(ZERO, f.at(sums, place * _VECTOR_BYTES))
    f.loop(num_steps, _SPAN, span)
    offsets = [f.load(f.at(bias, v * _VECTOR_BYTES)) for v in range(_PANEL_VECTORS)]
    for place, (r, v) in enumerate(places):
        total = f.b.fadd(f.load(f.at(sums, place * _VECTOR_BYTES)), offsets[v])
        f.store(total, f.at(y, (row_bytes, r), v * _VECTOR_BYTES))
    return f.end()


_pack: Any = written(_write_pack)
_multiply_rows: Any = written(_write_multiply, *[(_FEWEST + i,) for i in range(3)])

_X, _X_ROWS, _X_INNER, _X_PACKED = range(FIRST_ARGUMENT, FIRST_ARGUMENT + 4)


def _pack_blocks(task: Any) -> None:
    """Blocks of x, as long as there are any."""
    rows, inner = task[_X_ROWS], task[_X_INNER]
    item = next_item(task)
    while item < task[NUM_ITEMS]:
        first = item * rows // task[NUM_ITEMS]
        target = task[_X_PACKED] + item * inner * _VECTOR_BYTES
        x = task[_X] + first * inner * 4
        _pack(x, rows - 1 - first, inner * 4, inner, target, _VECTOR_BYTES)
        item = next_item(task)


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
    _INNER,
    _PACKED,
    _PANELS,
    _THREAD_BYTES,
    _NUM_THREADS,
    _NUM_TAKEN,
) = range(FIRST_ARGUMENT, FIRST_ARGUMENT + 15)


def _products(task: Any) -> None:
    """Groups of panels of the weight with all blocks of x, as long as there are any."""
    rows, columns, inner = task[_ROWS], task[_COLUMNS], task[_INNER]
    num_panels, num_blocks = (columns + PANEL - 1) // PANEL, (rows + _BLOCK - 1) // _BLOCK
    panel_bytes, block_bytes = inner * PANEL * 4, inner * _VECTOR_BYTES
    # Numbers that follow each other: different ones for all threads of one call.
    number = next_item(words_at(task[_NUM_TAKEN])) % task[_NUM_THREADS]
    sums = task[_PANELS] + number * task[_THREAD_BYTES]
    widened = sums + _SUMS_BYTES
    panels = widened + task[_WIDENED_BYTES]
    weight_bytes = task[_WEIGHT_BYTES]
    item = next_item(task)
    while item < task[NUM_ITEMS]:
        first = item * num_panels // task[NUM_ITEMS]
        end = (item + 1) * num_panels // task[NUM_ITEMS]
        for panel in range(first, end):
            # The last panel may do some columns again.
            weight = task[_WEIGHT] + min(panel * PANEL, columns - PANEL) * weight_bytes
            target = panels + (panel - first) * panel_bytes
            for half in range(_PANEL_VECTORS):
                begin = weight + half * LANES * weight_bytes
                if task[_KIND] != AS_THEY_ARE:
                    following = begin + LANES * weight_bytes
                    widen(task[_KIND], begin, LANES * task[_WEIGHT_BLOCKS], widened, following)
                    begin = widened
                place = target + half * _VECTOR_BYTES
                _pack(begin, LANES - 1, inner * 4, inner, place, _PANEL_VECTORS * _VECTOR_BYTES)
        for block in range(num_blocks):
            row = block * rows // num_blocks
            count = (block + 1) * rows // num_blocks - row
            x = task[_PACKED] + block * block_bytes
            for panel in range(first, end):
                column = min(panel * PANEL, columns - PANEL)
                y = task[_Y] + (row * columns + column) * 4
                packed = panels + (panel - first) * panel_bytes
                bias = task[_BIAS] + column * 4
                _multiply_rows(count - _FEWEST, x, packed, inner, bias, y, columns * 4, sums)
        item = next_item(task)


# Sums may not be reordered.
_pack_x = Loop(_pack_blocks, {"error_model": "numpy"})
_multiply = Loop(_products, {"error_model": "numpy"})
