"""Sums over words of blocks, wherever they lie: what :mod:`diptych.word_sums` defines.

Sums of integers come out the same in any order, so a block is cut into spans, one program for
each, and these add what they have to the block's sums.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_lines"])  # type: ignore[untyped-decorator]
def add_words(
    memory: tl.tensor,  # [...] int64, the words
    begins: tl.tensor,  # [N] int64, where each run of words begins
    counts: tl.tensor,  # [N] int64, how many words each has
    lines: tl.tensor,  # [N, num_lines] int64, -1: none; else None: all words
    numbers: tl.tensor,  # [N] int64, of each run's first word; else None: 0
    sums: tl.tensor,  # [N, 2] int64, added to
    num_lines: int,
    stride: tl.constexpr,
    other: tl.constexpr,
    line_words: tl.constexpr,
    tile: tl.constexpr,  # words that are added up at a time, of whole lines
    num_tiles: tl.constexpr,  # of a span
) -> None:
    """Launched over (runs, spans)."""
    run, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin, count = tl.load(begins + run), tl.load(counts + run)
    number = tl.full([], 0, tl.uint64)
    if numbers is not None:
        number = tl.load(numbers + run).to(tl.uint64)
    first = tl.zeros([tile], tl.uint64)
    second = tl.zeros([tile], tl.uint64)
    num_looked_at = num_lines * line_words if lines is not None else count
    end = tl.minimum((span + 1) * num_tiles, tl.cdiv(num_looked_at, tile)).to(tl.int32)
    for each in range(span * num_tiles, end):
        places = tl.full([], 0, tl.int64) + each * tile + tl.arange(0, tile)
        keys = (number + places.to(tl.uint64) + 1) * stride
        is_own = places < count
        if lines is not None:
            nth = places // line_words
            line = tl.load(lines + run * num_lines + nth, mask=nth < num_lines, other=-1)
            places = line * line_words + places % line_words
            is_own = (line >= 0) & (places < count)
        words = tl.load(memory + begin + places, mask=is_own, other=0)
        keyed = words.to(tl.uint64, bitcast=True) ^ keys
        first += tl.where(is_own, _product(keyed), 0)
        second += tl.where(is_own, _product(keyed ^ other), 0)
    tl.atomic_add(sums + run * 2, tl.sum(first, 0).to(tl.int64, bitcast=True), sem="relaxed")
    tl.atomic_add(sums + run * 2 + 1, tl.sum(second, 0).to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def _product(words: tl.tensor) -> tl.tensor:
    """Of the halves; both have 32 bits, which is what a device multiplies fastest."""
    low, high = words.to(tl.uint32), (words >> 32).to(tl.uint32)
    return low.to(tl.uint64) * high.to(tl.uint64)
