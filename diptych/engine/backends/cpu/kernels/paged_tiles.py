"""The inner loops of decode attention: scores of keys, their softmax, sums of values.

Scores of all query heads lie together, [num_keys, HEADS]: a tile of HEADS query heads
and TILE_KEYS keys is one vector, and its softmax needs no other order.
"""

# numba's own types do not tell what intrinsics take.
# mypy: disable-error-code="no-untyped-call"

from collections.abc import Callable
from itertools import product
from typing import Any

from numba import types
from numba.extending import intrinsic

from diptych.engine.backends.cpu.kernels.processor import LANES
from diptych.engine.backends.cpu.kernels.vector_function import (
    BFLOAT16,
    ELEMENT_BYTES,
    FLOAT,
    FLOAT32,
    I64,
    INT8,
    ZERO,
    VectorFunction,
)

HEADS = 4  # query heads of one pass over the keys, at most
TILE_KEYS = LANES // HEADS
_SCORE_BYTES = 4 * HEADS  # of one key
_VECTOR_BYTES = 4 * LANES
# Vectors of a value at a time: with their operands, the sums of HEADS heads fill the registers.
_VALUE_VECTORS = 4 if LANES == 16 else 2


def _write_scores(module: Any, kind: int, num_heads: int) -> Any:
    """f(q, keys, num_keys, head_dim, scores, ahead).

    q: [num_heads, head_dim] float32; keys: [num_keys, head_dim] elements; scores:
    [num_keys, HEADS] float32, written up to a whole tile. Fetches as much from
    ``ahead`` on as the keys have.
    """
    f = VectorFunction(module, f"scores_{kind}_{num_heads}", 6)
    q, keys, num_keys, head_dim, scores, ahead = f.arguments
    size = ELEMENT_BYTES[kind]
    key_bytes = f.b.mul(head_dim, I64(size))
    last = f.b.sub(num_keys, I64(1))

    def tile(first: Any) -> None:
        numbers = [f.b.add(first, I64(i)) for i in range(TILE_KEYS)]
        # Behind the last key it counts again.
        inside = [f.b.select(f.b.icmp_signed("<", n, last), n, last) for n in numbers]
        places = [f.at(keys, (n, key_bytes)) for n in inside]
        fetched = f.at(ahead, (first, key_bytes))

        def step(d: Any, *sums: Any) -> list[Any]:
            queries = [f.load(f.at(q, (d, 4), (head_dim, 4 * h))) for h in range(num_heads)]
            vectors = [f.elements(kind, f.at(place, (d, size))) for place in places]
            f.fetch(f.at(fetched, (d, TILE_KEYS * size)), TILE_KEYS * LANES * size)
            pairs = product(vectors, queries)
            return [f.plus_product(s, *pair) for s, pair in zip(sums, pairs, strict=True)]

        sums = f.loop(head_dim, LANES, step, *[ZERO] * (TILE_KEYS * num_heads))
        rows = (sums[i : i + num_heads] for i in range(0, len(sums), num_heads))
        padded = [s for row in rows for s in (*row, *[None] * (HEADS - num_heads))]
        f.store(f.sum_each(padded), f.at(scores, (first, _SCORE_BYTES)))

    f.loop(num_keys, TILE_KEYS, tile)
    return f.end()


def _write_softmax(module: Any) -> Any:
    """f(scores, num_tiles, scale, state): scores to weights in place.

    scores: [num_tiles * TILE_KEYS, HEADS] float32, -inf where there is no key; scale:
    address of a float32; state: [2, HEADS] float32, gets the largest scaled score and
    the sum of the weights, which are relative to it.
    """
    f = VectorFunction(module, "softmax", 4)
    scores, num_tiles, scale, state = f.arguments

    def row(i: Any) -> Any:
        return f.at(scores, (i, _VECTOR_BYTES))

    scales = f.splat(f.load(scale, FLOAT))
    (largest,) = f.loop(
        num_tiles, 1, lambda i, top: [f.larger(f.load(row(i)), top)], f.load(scores)
    )
    largest = f.b.fmul(f.fold_quads(f.larger, largest), scales)

    def weigh(i: Any, total: Any) -> list[Any]:
        weights = f.exp(f.b.fsub(f.b.fmul(f.load(row(i)), scales), largest))
        f.store(weights, row(i))
        return [f.add(total, weights)]

    (total,) = f.loop(num_tiles, 1, weigh, ZERO)
    total = f.fold_quads(f.add, total)
    for address, vector in ((state, largest), (f.at(state, _SCORE_BYTES), total)):
        f.store(f.shuffle(vector, vector, range(HEADS)), address)
    return f.end()


def _write_sums(module: Any, kind: int, num_heads: int) -> Any:
    """f(weights, values, num_values, head_dim, sums, sum_bytes, ahead).

    sums += weights.T @ values. weights: [num_values, HEADS] float32; values:
    [num_values, head_dim] elements; sums: num_heads rows of float32, sum_bytes apart.
    """
    f = VectorFunction(module, f"sums_{kind}_{num_heads}", 7)
    weights, values, num_values, head_dim, sums, sum_bytes, ahead = f.arguments
    size = ELEMENT_BYTES[kind]
    value_bytes = f.b.mul(head_dim, I64(size))

    def columns(begin: Any, count: int) -> None:
        """``count`` vectors of each value, from dimension ``begin`` on."""
        offset = f.b.mul(begin, I64(size))
        places = [
            f.at(sums, (sum_bytes, h), (begin, 4), _VECTOR_BYTES * i)
            for h in range(num_heads)
            for i in range(count)
        ]

        def step(i: Any, *totals: Any) -> list[Any]:
            place = f.at(values, offset, (i, value_bytes))
            vectors = [f.elements(kind, f.at(place, LANES * size * j)) for j in range(count)]
            f.fetch(f.at(ahead, offset, (i, value_bytes)), count * LANES * size)
            row = f.at(weights, (i, _SCORE_BYTES))
            splats = [f.splat(f.load(f.at(row, 4 * h), FLOAT)) for h in range(num_heads)]
            pairs = product(splats, vectors)
            return [f.plus_product(t, *pair) for t, pair in zip(totals, pairs, strict=True)]

        totals = f.loop(num_values, 1, step, *map(f.load, places))
        for total, place in zip(totals, places, strict=True):
            f.store(total, place)

    width = LANES * _VALUE_VECTORS
    whole = f.b.and_(head_dim, I64(-width))
    f.loop(whole, width, lambda d: columns(d, _VALUE_VECTORS))
    rest = f.b.sub(head_dim, whole)
    f.loop(rest, LANES, lambda d: columns(f.b.add(d, whole), 1))
    return f.end()


def _call_one_of(write: Callable[[Any, int, int], Any], builder: Any, arguments: Any) -> None:
    """Call what ``write`` makes for the first two arguments, a kind and a number of heads."""
    kind, num_heads, *rest = arguments
    done = builder.append_basic_block()
    choice = builder.switch(builder.add(builder.mul(kind, I64(HEADS)), num_heads), done)
    for each, count in product((FLOAT32, BFLOAT16, INT8), range(1, HEADS + 1)):
        block = builder.append_basic_block()
        choice.add_case(I64(each * HEADS + count), block)
        builder.position_at_end(block)
        builder.call(write(builder.module, each, count), rest)
        builder.branch(done)
    builder.position_at_end(done)


def _score(
    _typing: Any,
    kind: Any,
    num_heads: Any,
    q: Any,
    keys: Any,
    num_keys: Any,
    head_dim: Any,
    scores: Any,
    ahead: Any,
) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        _call_one_of(_write_scores, builder, arguments)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), generate


def _soften(_typing: Any, scores: Any, num_tiles: Any, scale: Any, state: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        builder.call(_write_softmax(builder.module), arguments)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


def _sum(
    _typing: Any,
    kind: Any,
    num_heads: Any,
    weights: Any,
    values: Any,
    num_values: Any,
    head_dim: Any,
    sums: Any,
    sum_bytes: Any,
    ahead: Any,
) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        _call_one_of(_write_sums, builder, arguments)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), generate


def _touch(_typing: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        f = VectorFunction(builder.module, "fetch_line", 1)
        f.fetch(f.arguments[0], 1)
        builder.call(f.end(), arguments)
        return context.get_dummy_value()

    return types.void(types.int64), generate


score: Any = intrinsic(_score)  # (kind, num_heads, ...): see _write_scores
soften: Any = intrinsic(_soften)  # see _write_softmax
sum_values: Any = intrinsic(_sum)  # (kind, num_heads, ...): see _write_sums
fetch_line: Any = intrinsic(_touch)  # of an address
