"""Draws of tokens from logits, as the host's sampler defines them, in passes over the vocabulary.

It is cut into parts, one program for each part of a row; what a part finds is merged by those
that come after. What the filters keep has an edge: all logits above a level, and of those at
it the first ids. The level is found by its bits, two at a time, so nothing is sorted, and how
much is kept makes no difference. Sums are in float64 and in one order: a row's token does not
depend on its batch, nor on the run.
"""

import triton
import triton.language as tl

# A row's rules, 64 bits each: the first three are integers, the others float64.
TOP_K, SEED, POSITION, TEMPERATURE, TOP_P, MIN_P = map(tl.constexpr, range(6))
NUM_FIELDS = tl.constexpr(6)
# What is told of a row.
TOKEN, MARGIN, LARGEST = map(tl.constexpr, range(3))
NUM_TOLD = tl.constexpr(3)

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)


@triton.jit(do_not_specialize=["vocab_size"])  # type: ignore[untyped-decorator]
def find_largest(
    logits: tl.tensor,  # [R, vocab_size] float32
    largest: tl.tensor,  # [R, num_parts, 2] float32: of each part, and the next one in it
    ids: tl.tensor,  # [R, num_parts] int32, the lowest that has it
    vocab_size: int,
    part_size: tl.constexpr,
) -> None:
    """Launched over (rows, parts). What is no number counts as infinite."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    places = part * part_size + tl.arange(0, part_size)
    is_token = places < vocab_size
    values = tl.load(logits + row * vocab_size + places, mask=is_token, other=float("-inf"))
    values = tl.where(values == values, values, float("inf"))
    most = tl.max(values, 0)
    first = tl.min(tl.where(values == most, places, vocab_size), 0)
    others = tl.where(places == first, float("-inf"), values)
    target = row * tl.num_programs(1) + part
    tl.store(largest + 2 * target, most)
    tl.store(largest + 2 * target + 1, tl.max(others, 0))
    tl.store(ids + target, first)


@triton.jit(do_not_specialize=["vocab_size"])  # type: ignore[untyped-decorator]
def weigh(
    logits: tl.tensor,  # [R, vocab_size]
    largest: tl.tensor,  # [R, num_parts, 2]
    rules: tl.tensor,  # [R, NUM_FIELDS] int64
    levels: tl.tensor,  # [R, vocab_size] int32, of rows with filters; may be the logits' memory
    weights: tl.tensor,  # [R, vocab_size] float32, of rows that are drawn
    sums: tl.tensor,  # [R, num_parts] float64, of each part's weights
    vocab_size: int,
    greedy_below: tl.constexpr,
    part_size: tl.constexpr,
    width: tl.constexpr,  # the power of two that holds all parts
) -> None:
    """Launched over (rows, parts). Of what min_p keeps; of all where another filter follows."""
    row, part, num_parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    temperature = _real(rules, row, TEMPERATURE)
    best = _best(largest + row * num_parts * 2, num_parts, width)
    if _is_drawn(temperature, best, greedy_below):
        is_cut = _is_cut(rules, row, vocab_size)
        least = tl.where(is_cut, 0.0, _real(rules, row, MIN_P))
        places = part * part_size + tl.arange(0, part_size)
        is_token, own = places < vocab_size, row * vocab_size + places
        values = tl.load(logits + own, mask=is_token, other=float("-inf"))
        below = values - best
        scale = tl.zeros_like(below) + temperature.to(tl.float32)
        # Rounded once: a fast exponential is wrong by the more the less likely a token is.
        found = tl.exp(tl.div_rn(below, scale).to(tl.float64)).to(tl.float32)
        found = tl.where(found.to(tl.float64) >= least, found, 0.0)
        tl.store(weights + own, found, mask=is_token)
        tl.store(sums + row * num_parts + part, tl.sum(found.to(tl.float64), 0))
        if is_cut:
            tl.store(levels + own, _ordered(values), mask=is_token)


@triton.jit(do_not_specialize=["vocab_size", "num_parts"])  # type: ignore[untyped-decorator]
def cut(
    levels: tl.tensor,  # [R, vocab_size] int32
    largest: tl.tensor,  # [R, num_parts, 2]
    rules: tl.tensor,  # [R, NUM_FIELDS]
    weights: tl.tensor,  # [R, vocab_size], in place: zero where the filter leaves out
    sums: tl.tensor,  # [R, num_parts], of what is left
    vocab_size: int,
    num_parts: int,
    by_weight: tl.constexpr,  # top_p of what there is; else top_k
    greedy_below: tl.constexpr,
    part_size: tl.constexpr,
    width: tl.constexpr,
) -> None:
    """Launched over (rows). The last filter of a row is followed by min_p."""
    row = tl.program_id(0).to(tl.int64)
    best = _best(largest + row * num_parts * 2, num_parts, width)
    top_k, top_p = tl.load(rules + row * NUM_FIELDS + TOP_K), _real(rules, row, TOP_P)
    is_asked = top_p < 1.0 if by_weight else top_k < vocab_size
    if is_asked & _is_drawn(_real(rules, row, TEMPERATURE), best, greedy_below):
        order, own, parts = (
            levels + row * vocab_size,
            weights + row * vocab_size,
            sums + row * num_parts,
        )
        least = _real(rules, row, MIN_P)
        if by_weight:
            each_part = tl.load(
                parts + tl.arange(0, width), mask=tl.arange(0, width) < num_parts, other=0.0
            )
            wanted = top_p * tl.sum(each_part, 0)
        else:
            wanted = top_k.to(tl.float64)
            least = tl.where(top_p < 1.0, 0.0, least)
        level = _level(order, own, vocab_size, wanted, by_weight, part_size)
        above = tl.zeros([part_size], tl.float64)
        each = tl.zeros([part_size], tl.float64)  # of those at the level, who have all the same
        for part in range(num_parts):
            found, share = _shares(order, own, vocab_size, part, by_weight, part_size)
            above += tl.where(found > level, share, 0.0)
            each = tl.maximum(each, tl.where(found == level, share, 0.0))
        num_there = tl.ceil((wanted - tl.sum(above, 0)) / tl.maximum(tl.max(each, 0), 1e-300))
        num_before = tl.full([], 0, tl.int32)
        for part in range(num_parts):
            places = part * part_size + tl.arange(0, part_size)
            is_token = places < vocab_size
            found = tl.load(order + places, mask=is_token, other=0).to(tl.uint32, bitcast=True)
            ranks = num_before + tl.cumsum((found == level).to(tl.int32), 0)
            num_before = tl.max(ranks, 0)
            is_kept = (found > level) | ((found == level) & (ranks.to(tl.float64) <= num_there))
            kept = tl.load(own + places, mask=is_token & is_kept, other=0.0)
            kept = tl.where(kept.to(tl.float64) >= least, kept, 0.0)
            tl.store(own + places, kept, mask=is_token)
            tl.store(parts + part, tl.sum(kept.to(tl.float64), 0))


@triton.jit(do_not_specialize=["vocab_size", "num_parts"])  # type: ignore[untyped-decorator]
def draw(
    largest: tl.tensor,  # [R, num_parts, 2]
    ids: tl.tensor,  # [R, num_parts]
    rules: tl.tensor,  # [R, NUM_FIELDS]
    weights: tl.tensor,  # [R, vocab_size]
    sums: tl.tensor,  # [R, num_parts]
    told: tl.tensor,  # [R, NUM_TOLD] float64
    vocab_size: int,
    num_parts: int,
    greedy_below: tl.constexpr,
    part_size: tl.constexpr,
    width: tl.constexpr,
) -> None:
    """Launched over (rows)."""
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, width)
    is_part = parts < num_parts
    tops = largest + (row * num_parts + parts) * 2
    firsts = tl.load(tops, mask=is_part, other=float("-inf"))
    best = tl.max(firsts, 0)
    part = tl.min(tl.where(firsts == best, parts, width), 0)
    nexts = tl.load(tops + 1, mask=is_part, other=float("-inf"))
    second = tl.max(tl.where(parts == part, nexts, firsts), 0)
    token = tl.load(ids + row * num_parts + part)
    margin = tl.where(tl.abs(best) < float("inf"), best, 0.0).to(tl.float64) - second.to(tl.float64)
    if _is_drawn(_real(rules, row, TEMPERATURE), best, greedy_below):
        # The part in which the target falls, then the token: inverse CDF in order of ids.
        shares = tl.load(sums + row * num_parts + parts, mask=is_part, other=0.0)
        ends = tl.cumsum(shares, 0)
        total = tl.max(ends, 0)
        target = _uniform(rules, row) * total
        part = _fallen(ends, shares, parts, target, width)
        end = tl.sum(tl.where(parts == part, ends, 0.0), 0)
        before = end - tl.sum(tl.where(parts == part, shares, 0.0), 0)
        places = tl.arange(0, part_size)
        is_token = part * part_size + places < vocab_size
        own = weights + row * vocab_size + part * part_size + places
        inside = tl.load(own, mask=is_token, other=0.0).to(tl.float64)
        ends = before + tl.cumsum(inside, 0)
        place = _fallen(ends, inside, places, target, part_size)
        above = tl.sum(tl.where(places == place, ends, 0.0), 0)
        below = above - tl.sum(tl.where(places == place, inside, 0.0), 0)
        # An end of the whole line is no boundary: there is nothing on the other side.
        line = tl.max(ends, 0) + (total - end)
        to_lower = tl.where(below > 0.0, target - below, line)
        to_upper = tl.where(above < line, above - target, line)
        token = part * part_size + place
        margin = tl.maximum(tl.minimum(to_lower, to_upper) / line, 0.0)
    tl.store(told + row * NUM_TOLD + TOKEN, token.to(tl.float64))
    tl.store(told + row * NUM_TOLD + MARGIN, margin)
    tl.store(told + row * NUM_TOLD + LARGEST, best.to(tl.float64))


@triton.jit  # type: ignore[untyped-decorator]
def _level(
    order: tl.tensor,  # [vocab_size], of one row
    weights: tl.tensor,
    vocab_size: int,
    wanted: tl.tensor,
    by_weight: tl.constexpr,
    tile: tl.constexpr,
) -> tl.tensor:
    """The highest level above which, itself included, lies what is wanted."""
    level = tl.full([], 0, tl.uint32)
    for step in range(16):
        # Three at once: what reaches one reaches those below it.
        unit = tl.full([], 1, tl.uint32) << (30 - 2 * step)
        ones = tl.zeros([tile], tl.float64)
        twos = tl.zeros([tile], tl.float64)
        threes = tl.zeros([tile], tl.float64)
        for part in range(tl.cdiv(vocab_size, tile)):
            found, share = _shares(order, weights, vocab_size, part, by_weight, tile)
            ones += tl.where(found >= level + unit, share, 0.0)
            twos += tl.where(found >= level + 2 * unit, share, 0.0)
            threes += tl.where(found >= level + 3 * unit, share, 0.0)
        num_units = (tl.sum(ones, 0) >= wanted).to(tl.uint32)
        num_units += (tl.sum(twos, 0) >= wanted).to(tl.uint32)
        num_units += (tl.sum(threes, 0) >= wanted).to(tl.uint32)
        level += num_units * unit
    return level


@triton.jit  # type: ignore[untyped-decorator]
def _shares(
    order: tl.tensor,
    weights: tl.tensor,
    vocab_size: int,
    part: tl.tensor,
    by_weight: tl.constexpr,
    tile: tl.constexpr,
) -> tl.tensor:
    """Levels of a part's tokens, [tile] uint32, and what each adds: its weight, or 1."""
    places = part * tile + tl.arange(0, tile)
    is_token = places < vocab_size
    found = tl.load(order + places, mask=is_token, other=0).to(tl.uint32, bitcast=True)
    if by_weight:
        share = tl.load(weights + places, mask=is_token, other=0.0).to(tl.float64)
    else:
        share = tl.full([tile], 1.0, tl.float64)  # no level that is looked at is that of no token
    return found, share


@triton.jit  # type: ignore[untyped-decorator]
def _ordered(values: tl.tensor) -> tl.tensor:
    """Bits of unsigned integers in the order of the values; zeros of both signs are one."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) | (-2147483647 - 1))


@triton.jit  # type: ignore[untyped-decorator]
def _fallen(
    ends: tl.tensor, shares: tl.tensor, places: tl.tensor, target: tl.tensor, width: tl.constexpr
) -> tl.tensor:
    """In which place a target falls; never in one without a share."""
    # Rounding may put a target at the very end, or a hair before the first.
    place = tl.sum((ends <= target).to(tl.int32), 0)
    place = tl.maximum(place, tl.min(tl.where(shares > 0.0, places, width - 1), 0))
    return tl.minimum(place, tl.max(tl.where(shares > 0.0, places, 0), 0))


@triton.jit  # type: ignore[untyped-decorator]
def _best(largest: tl.tensor, num_parts: int, width: tl.constexpr) -> tl.tensor:
    """Of one row: [num_parts, 2]."""
    parts = tl.arange(0, width)
    found = tl.load(largest + 2 * parts, mask=parts < num_parts, other=float("-inf"))
    return tl.max(found, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _is_drawn(temperature: tl.tensor, best: tl.tensor, greedy_below: tl.constexpr) -> tl.tensor:
    """Whether the row is not greedy, and has anything to draw."""
    return (temperature >= greedy_below) & (tl.abs(best) < float("inf"))


@triton.jit  # type: ignore[untyped-decorator]
def _is_cut(rules: tl.tensor, row: tl.tensor, vocab_size: int) -> tl.tensor:
    top_k = tl.load(rules + row * NUM_FIELDS + TOP_K)
    return (top_k < vocab_size) | (_real(rules, row, TOP_P) < 1.0)


@triton.jit  # type: ignore[untyped-decorator]
def _real(rules: tl.tensor, row: tl.tensor, field: tl.constexpr) -> tl.tensor:
    return tl.load(rules + row * NUM_FIELDS + field).to(tl.float64, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _uniform(rules: tl.tensor, row: tl.tensor) -> tl.tensor:
    """The bits of ``diptych.engine.sampling.sampler.mix``, at stream 0."""
    seed = tl.load(rules + row * NUM_FIELDS + SEED).to(tl.uint64, bitcast=True)
    position = tl.load(rules + row * NUM_FIELDS + POSITION).to(tl.uint64, bitcast=True)
    state = _finalised(seed + _GOLDEN)
    state = _finalised((state ^ position) + _GOLDEN)
    state = _finalised(state + _GOLDEN)
    return (state >> 11).to(tl.int64, bitcast=True).to(tl.float64) * 2.0**-53


@triton.jit  # type: ignore[untyped-decorator]
def _finalised(x: tl.tensor) -> tl.tensor:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)
