"""The inner loops of prefill attention: scores, their softmax and sums of values.

A tile is TILE_ROWS rows (a row is one query head of one token) by up to TILE_KEYS
keys. The lanes of a vector are rows, so that the softmax needs no sum across lanes, a
key's or value's number is one splat for many rows, and keys and values are used as
they lie; queries are transposed once per tile and sums once at its end. Scores are
logarithms to base 2.

All numbers are float32. Keys and values are found by ``places``, byte offsets from a
base: [num_keys] int64.
"""

# numba's own types do not tell what intrinsics take.
# mypy: disable-error-code="no-untyped-call"

from collections.abc import Sequence
from itertools import product
from typing import Any

from llvmlite import ir

from diptych.engine.backends.cpu.kernels.processor import LANES
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

VECTORS = 3  # of rows in a tile, at most
TILE_ROWS = VECTORS * LANES
TILE_KEYS = 128
NO_SCORE = -3e38  # below every score, and no infinity, which has no difference to itself

_SPLATS = 8 if LANES == 16 else 4  # times VECTORS sums; with the operands, this fills the registers
_VECTOR_BYTES = 4 * LANES
_ROW_BYTES = 4 * TILE_ROWS  # of one dimension (or key) of all rows
INNER = 64  # dimensions of all rows that stay in the nearest cache beside scores and keys

_STEP_KEYS = 4  # whose largest score is found at a time


def _write_scores(module: Any, num_vectors: int, more: bool) -> Any:
    """f(queries, places, keys, num_keys, num_dims, scores).

    scores = keys @ queries, or that much ``more``. queries: [num_dims, TILE_ROWS]; keys:
    the base of places; scores: [num_keys, TILE_ROWS], written up to a whole number of
    _SPLATS keys.
    """
    f = VectorFunction(module, f"tile_scores_{num_vectors}_{int(more)}", 6)
    queries, places, keys, num_keys, num_dims, scores = f.arguments
    last = f.b.sub(num_keys, I64(1))

    def group(first: Any) -> None:
        numbers = [f.b.add(first, I64(i)) for i in range(_SPLATS)]
        # Behind the last key it counts again.
        inside = [f.b.select(f.b.icmp_signed("<", n, last), n, last) for n in numbers]
        rows = [f.b.add(keys, f.load(f.at(places, (n, 8)), I64)) for n in inside]
        targets = [
            f.at(scores, (n, _ROW_BYTES), _VECTOR_BYTES * v)
            for n in numbers
            for v in range(num_vectors)
        ]

        def step(d: Any, *sums: Any) -> list[Any]:
            vectors = _row_vectors(f, f.at(queries, (d, _ROW_BYTES)), num_vectors)
            return _plus_products(f, sums, [f.at(row, (d, 4)) for row in rows], vectors)

        sums = f.loop(num_dims, 1, step, *[ZERO] * len(targets))
        for value, target in zip(sums, targets, strict=True):
            f.store(f.add(f.load(target), value) if more else value, target)

    f.loop(num_keys, _SPLATS, group)
    return f.end()


def _write_sums(module: Any, num_vectors: int) -> Any:
    """f(weights, places, values, num_keys, head_dim, factors, sums).

    sums = sums * factors + values.T @ weights. weights: [num_keys, TILE_ROWS]; sums:
    [head_dim, TILE_ROWS]; factors: [TILE_ROWS].
    """
    f = VectorFunction(module, f"tile_sums_{num_vectors}", 7)
    weights, places, values, num_keys, head_dim, factors, sums = f.arguments

    def columns(first: Any) -> None:
        base = f.at(values, (first, 4))
        targets = [
            f.at(sums, (first, _ROW_BYTES), _ROW_BYTES * i + _VECTOR_BYTES * v)
            for i in range(_SPLATS)
            for v in range(num_vectors)
        ]

        def step(key: Any, *totals: Any) -> list[Any]:
            vectors = _row_vectors(f, f.at(weights, (key, _ROW_BYTES)), num_vectors)
            place = f.b.add(base, f.load(f.at(places, (key, 8)), I64))
            return _plus_products(f, totals, [f.at(place, 4 * i) for i in range(_SPLATS)], vectors)

        # From zero and added at the end: sums over fewer numbers are more exact.
        totals = f.loop(num_keys, 1, step, *[ZERO] * len(targets))
        by = _row_vectors(f, factors, num_vectors)
        for i, (value, target) in enumerate(zip(totals, targets, strict=True)):
            f.store(f.plus_product(value, f.load(target), by[i % num_vectors]), target)

    f.loop(head_dim, _SPLATS, columns)
    return f.end()


def _write_softmax(module: Any, num_vectors: int) -> Any:
    """f(scores, num_keys, state): scores to weights in place.

    state: [3, TILE_ROWS], the largest score of each row, the sum of its weights, which
    are relative to it, and by what earlier weights were multiplied.
    """
    f = VectorFunction(module, f"tile_softmax_{num_vectors}", 3)
    scores, num_keys, state = f.arguments
    largest_at, total_at, factor_at = (f.at(state, i * _ROW_BYTES) for i in range(3))
    before = _row_vectors(f, largest_at, num_vectors)

    def larger(first: Any, largest: tuple[Any, ...], num_keys: int) -> list[Any]:
        lines = [
            _row_vectors(f, f.at(scores, (first, _ROW_BYTES), _ROW_BYTES * i), num_vectors)
            for i in range(num_keys)
        ]
        while len(lines) > 1:
            half = len(lines) // 2
            lines = [
                list(map(f.larger, *pair)) for pair in zip(lines[:half], lines[half:], strict=True)
            ]
        return list(map(f.larger, lines[0], largest))

    whole = f.b.and_(num_keys, I64(-_STEP_KEYS))
    largest = f.loop(whole, _STEP_KEYS, lambda i, *tops: larger(i, tops, _STEP_KEYS), *before)
    rest = f.b.sub(num_keys, whole)
    largest = f.loop(rest, 1, lambda i, *tops: larger(f.b.add(whole, i), tops, 1), *largest)

    def weigh(key: Any, *totals: Any) -> list[Any]:
        line = f.at(scores, (key, _ROW_BYTES))
        result = []
        for v, score in enumerate(_row_vectors(f, line, num_vectors)):
            weight = _exp2(f, f.b.fsub(score, largest[v]))
            f.store(weight, f.at(line, _VECTOR_BYTES * v))
            result.append(f.b.fadd(totals[v], weight))
        return result

    totals = f.loop(num_keys, 1, weigh, *[ZERO] * num_vectors)
    for v in range(num_vectors):
        offset = _VECTOR_BYTES * v
        factor = _exp2(f, f.b.fsub(before[v], largest[v]))
        total = f.b.fmul(f.load(f.at(total_at, offset)), factor)
        f.store(largest[v], f.at(largest_at, offset))
        f.store(f.b.fadd(total, totals[v]), f.at(total_at, offset))
        f.store(factor, f.at(factor_at, offset))
    return f.end()


def _write_hide(module: Any) -> Any:
    """f(scores, num_keys, first_key, limits): -inf where a row does not see a key.

    limits: [2, TILE_ROWS] int32; a row sees keys from the first to before the second.
    """
    f = VectorFunction(module, "tile_hide", 4)
    scores, num_keys, first_key, limits = f.arguments
    begins, ends = (
        [f.load(f.at(limits, _ROW_BYTES * i + _VECTOR_BYTES * v), INTEGERS) for v in range(VECTORS)]
        for i in range(2)
    )
    nothing = VECTOR([float("-inf")] * LANES)

    def line(key: Any) -> None:
        number = f.b.trunc(f.b.add(first_key, key), I32)
        numbers = f.b.insert_element(INTEGERS(ir.Undefined), number, I32(0))
        numbers = f.b.shuffle_vector(numbers, numbers, INTEGERS([0] * LANES))
        for v in range(VECTORS):
            place = f.at(scores, (key, _ROW_BYTES), _VECTOR_BYTES * v)
            seen = f.b.and_(
                f.b.icmp_signed(">=", numbers, begins[v]), f.b.icmp_signed("<", numbers, ends[v])
            )
            f.store(f.b.select(seen, f.load(place), nothing), place)

    f.loop(num_keys, 1, line)
    return f.end()


def _write_take(module: Any, num_vectors: int) -> Any:
    """f(q, rows, head_dim, scale, queries): queries = (rows of q).T * scale.

    rows: [TILE_ROWS] int64, byte offsets; queries: [head_dim, TILE_ROWS]; scale: address.
    """
    f = VectorFunction(module, f"tile_take_{num_vectors}", 5)
    q, rows, head_dim, scale, queries = f.arguments
    scales = f.splat(f.load(scale, FLOAT))

    def block(d: Any, v: int) -> None:
        places = _row_places(f, q, rows, v)
        vectors = f.transposed([f.load(f.at(place, (d, 4))) for place in places])
        for i, vector in enumerate(vectors):
            target = f.at(queries, (d, _ROW_BYTES), _ROW_BYTES * i + _VECTOR_BYTES * v)
            f.store(f.b.fmul(vector, scales), target)

    for v in range(num_vectors):
        f.loop(head_dim, LANES, lambda d, v=v: block(d, v))
    return f.end()


def _write_give(module: Any, num_vectors: int) -> Any:
    """f(sums, totals, head_dim, out, rows): (rows of out) = (sums / totals).T."""
    f = VectorFunction(module, f"tile_give_{num_vectors}", 5)
    sums, totals, head_dim, out, rows = f.arguments

    def block(d: Any, v: int) -> None:
        total = f.load(f.at(totals, _VECTOR_BYTES * v))
        sources = [
            f.at(sums, (d, _ROW_BYTES), _ROW_BYTES * i + _VECTOR_BYTES * v) for i in range(LANES)
        ]
        vectors = f.transposed([f.b.fdiv(f.load(source), total) for source in sources])
        for place, vector in zip(_row_places(f, out, rows, v), vectors, strict=True):
            f.store(vector, f.at(place, (d, 4)))

    for v in range(num_vectors):
        f.loop(head_dim, LANES, lambda d, v=v: block(d, v))
    return f.end()


def _row_vectors(f: VectorFunction, address: Any, num_vectors: int) -> list[Any]:
    return [f.load(f.at(address, _VECTOR_BYTES * v)) for v in range(num_vectors)]


def _row_places(f: VectorFunction, base: Any, rows: Any, v: int) -> list[Any]:
    """Addresses of the rows of vector ``v``."""
    offsets = [f.load(f.at(rows, 8 * (LANES * v + i)), I64) for i in range(LANES)]
    return [f.b.add(base, offset) for offset in offsets]


def _plus_products(
    f: VectorFunction, sums: Sequence[Any], places: list[Any], vectors: list[Any]
) -> list[Any]:
    """Each sum plus its product of a number at one of ``places`` and a vector.

    Numbers are loaded one at a time: registers do not suffice for all of them.
    """
    added, rest = [], iter(sums)
    for place in places:
        splat = f.splat(f.load(place, FLOAT))
        added += [f.plus_product(next(rest), splat, vector) for vector in vectors]
    return added


def _exp2(f: VectorFunction, x: Any) -> Any:
    """2**x of each lane for x <= 0: 0 below -126, NaN for NaN. Relative error below 2e-7."""
    b = f.b

    def constant(number: float) -> Any:
        return VECTOR([number] * LANES)

    vanishes = b.fcmp_ordered("<", x, constant(-126.0))
    x = b.select(vanishes, constant(-126.0), x)
    rounding = constant(1.5 * 2**23)  # the sum's last bit is 1: what is behind the point is lost
    whole = b.fadd(x, rounding)
    rest = b.fsub(x, b.fsub(whole, rounding))
    # 2**rest on [-0.5, 0.5]: least largest relative error (2e-8) at degree 6, exact at 0.
    p = constant(0.00015353361959569156)
    for coefficient in (
        0.0013398875016719103,
        0.00961843691766262,
        0.055503323674201965,
        0.24022647738456726,
        0.6931471824645996,
        1.0,
    ):
        p = b.fadd(b.fmul(p, rest, flags=["contract"]), constant(coefficient), flags=["contract"])
    exponent = b.shl(b.bitcast(whole, INTEGERS), INTEGERS([23] * LANES))
    power = b.bitcast(b.add(b.bitcast(p, INTEGERS), exponent), VECTOR)
    return b.select(vanishes, ZERO, power)


_BY_VECTORS = [(n,) for n in range(1, VECTORS + 1)]

# Where there are variants, the first argument is the number of vectors less one.
score: Any = written(_write_scores, *product(range(1, VECTORS + 1), (False,)))
score_more: Any = written(_write_scores, *product(range(1, VECTORS + 1), (True,)))
sum_values: Any = written(_write_sums, *_BY_VECTORS)
soften: Any = written(_write_softmax, *_BY_VECTORS)
hide: Any = written(_write_hide)
take: Any = written(_write_take, *_BY_VECTORS)
give: Any = written(_write_give, *_BY_VECTORS)
