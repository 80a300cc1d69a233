"""Decode attention over KV blocks where they lie; each block is streamed once.

An item of work is a piece of one row's context for one key-value head, with all the
query heads that share it. Pieces begin and end at places that depend on the row
alone, and whoever does a row's last piece merges them in order: a row's result has
the same bits whatever the other rows are and however many threads there are.

The two inner loops (queries times keys, weights times values) keep their sums in
vector registers, written here as LLVM instructions because no compiler keeps them
there by itself. While one block is used the next is prefetched: blocks are scattered,
which the processor's own prefetching does not see.
"""

# numba's own types do not tell what compiled functions and intrinsics take.
# mypy: disable-error-code="attr-defined,call-arg,no-untyped-call,no-any-return"
# mypy: disable-error-code="var-annotated,untyped-decorator"

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic
from numpy.typing import NDArray

from diptych.engine.kernels.exponent import exp
from diptych.engine.kernels.loop import FLOAT_RULES, NUM_ITEMS, Loop, floats_at, next_item

FLOAT32, BFLOAT16, INT8 = range(3)  # kinds of element
LANES = 16  # a head's size is a multiple of this
PIECE_TOKENS = 128
STATE_FLOATS = 2  # kept of a piece besides its sums: largest score, sum of the weights

_ELEMENT_BYTES = (4, 2, 1)
_MAX_HEADS = 4  # query heads of one pass over a block
_LINE_BYTES = 64

_WIDE = "+avx512f" in cpu_target.target_context.codegen()._tm_features.split(",")
# With their operands, these sums of four heads fill the registers.
_KEYS = 4 if _WIDE else 1  # at a time
_CHUNK = 4 if _WIDE else 1  # vectors of a value at a time

_I8, _I16, _I32, _I64, _FLOAT = (*map(ir.IntType, (8, 16, 32, 64)), ir.FloatType())
_VECTOR = ir.VectorType(_FLOAT, LANES)
_ZERO = ir.Constant(_VECTOR, [0.0] * LANES)
_RULES = ("reassoc", "contract", "nsz")


class _Function:
    """Writes one function of 64-bit integers into an LLVM module. ``b`` is its builder."""

    def __init__(self, module: Any, name: str, kind: int, num_arguments: int) -> None:
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_I64] * num_arguments), name)
        function.linkage = "internal"
        self.function, self.arguments = function, function.args
        self.element_bytes = _ELEMENT_BYTES[kind]
        self.b = ir.IRBuilder(function.append_basic_block())
        self._kind = kind
        self._reduce = cgutils.get_or_insert_function(
            module,
            ir.FunctionType(_FLOAT, [_FLOAT, _VECTOR]),
            f"llvm.vector.reduce.fadd.v{LANES}f32",
        )
        self._prefetch = cgutils.get_or_insert_function(
            module,
            ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32]),
            "llvm.prefetch.p0",
        )

    def floats(self, address: Any, type_: Any = _VECTOR) -> Any:
        """What lies at an address."""
        return self.b.load(self.b.inttoptr(address, type_.as_pointer()), align=4)

    def store(self, value: Any, address: Any) -> None:
        self.b.store(value, self.b.inttoptr(address, value.type.as_pointer()), align=4)

    def elements(self, address: Any) -> Any:
        """A vector of the cache's elements, as floats."""
        b = self.b
        if self._kind == FLOAT32:
            return self.floats(address)
        integer = _I16 if self._kind == BFLOAT16 else _I8
        pointer = ir.VectorType(integer, LANES).as_pointer()
        loaded = b.load(b.inttoptr(address, pointer), align=1)
        wide = ir.VectorType(_I32, LANES)
        if self._kind == INT8:
            return b.sitofp(b.sext(loaded, wide), _VECTOR)
        return b.bitcast(b.shl(b.zext(loaded, wide), ir.Constant(wide, [16] * LANES)), _VECTOR)

    def splat(self, number: Any) -> Any:
        first = self.b.insert_element(ir.Constant(_VECTOR, ir.Undefined), number, _I32(0))
        lanes = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
        return self.b.shuffle_vector(first, first, lanes)

    def plus_product(self, total: Any, left: Any, right: Any) -> Any:
        return self.b.fadd(total, self.b.fmul(left, right, flags=_RULES), flags=_RULES)

    def sum_lanes(self, vector: Any) -> Any:
        return self.b.call(self._reduce, [_FLOAT(0.0), vector], fastmath=_RULES)

    def plus(self, address: Any, count: Any, size: int = 1) -> Any:
        """``count`` things of ``size`` bytes further on."""
        return self.b.add(address, self.b.mul(count, _I64(size)))

    def fetch(self, address: Any, num_bytes: int) -> None:
        for offset in range(0, num_bytes, _LINE_BYTES):
            place = self.b.inttoptr(self.b.add(address, _I64(offset)), _I8.as_pointer())
            self.b.call(self._prefetch, [place, _I32(0), _I32(3), _I32(1)])

    def loop(self, begin: Any, end: Any, step: int, body: Callable[..., Any], *sums: Any) -> Any:
        """``for i in range(begin, end - step + 1, step): sums = body(i, *sums)``.

        Returns what i and the sums are then.
        """
        b = self.b
        entry, last = b.block, b.sub(end, _I64(step))
        head, inside, after = (self.function.append_basic_block() for _ in range(3))
        b.branch(head)
        b.position_at_end(head)
        index, *carried = phis = [b.phi(value.type) for value in (begin, *sums)]
        for phi, value in zip(phis, (begin, *sums), strict=True):
            phi.add_incoming(value, entry)
        b.cbranch(b.icmp_signed("<=", index, last), inside, after)
        b.position_at_end(inside)
        following = [b.add(index, _I64(step)), *(body(index, *carried) or ())]
        for phi, value in zip(phis, following, strict=True):
            following_block = b.block
            phi.add_incoming(value, following_block)
        b.branch(head)
        b.position_at_end(after)
        return phis


def _write_scores(module: Any, kind: int, num_heads: int) -> Any:
    """f(q, keys, num_keys, head_dim, scores, score_bytes, ahead).

    q: [num_heads, head_dim] float32; keys: [num_keys, head_dim] elements; scores:
    num_heads rows, score_bytes apart. Prefetches as many bytes as the keys have.
    """
    f = _Function(module, f"scores_{kind}_{num_heads}", kind, 7)
    q, keys, num_keys, head_dim, scores, score_bytes, ahead = f.arguments
    heads = range(num_heads)
    key_bytes = f.b.mul(head_dim, _I64(f.element_bytes))

    def some(count: int) -> Callable[[Any], None]:
        def one_tile(first: Any) -> None:
            begin = f.b.mul(first, key_bytes)

            def step(d: Any, *sums: Any) -> list[Any]:
                queries = [f.floats(f.plus(f.plus(q, d, 4), head_dim, 4 * head)) for head in heads]
                place = f.plus(f.b.add(keys, begin), d, f.element_bytes)
                vectors = [f.elements(f.plus(place, key_bytes, key)) for key in range(count)]
                f.fetch(
                    f.plus(f.b.add(ahead, begin), d, count * f.element_bytes),
                    count * LANES * f.element_bytes,
                )
                pairs = [(query, vector) for query in queries for vector in vectors]
                return [
                    f.plus_product(total, *pair) for total, pair in zip(sums, pairs, strict=True)
                ]

            _, *sums = f.loop(_I64(0), head_dim, LANES, step, *[_ZERO] * (num_heads * count))
            for place, total in enumerate(sums):
                head, key = divmod(place, count)
                row = f.plus(f.plus(scores, score_bytes, head), first, 4)
                f.store(f.sum_lanes(total), f.b.add(row, _I64(4 * key)))

        return one_tile

    (done,) = f.loop(_I64(0), num_keys, _KEYS, some(_KEYS))
    f.loop(done, num_keys, 1, some(1))
    f.b.ret_void()
    return f.function


def _write_sums(module: Any, kind: int, num_heads: int) -> Any:
    """f(weights, values, num_values, head_dim, sums, weight_bytes, sum_bytes, ahead).

    sums += weights @ values. weights, sums: num_heads rows of float32, weight_bytes and
    sum_bytes apart; values: [num_values, head_dim] elements.
    """
    f = _Function(module, f"sums_{kind}_{num_heads}", kind, 8)
    weights, values, num_values, head_dim, sums, weight_bytes, sum_bytes, ahead = f.arguments
    heads = range(num_heads)
    value_bytes = f.b.mul(head_dim, _I64(f.element_bytes))

    def some(count: int) -> Callable[[Any], None]:
        def one_chunk(d: Any) -> None:
            begin = f.b.mul(d, _I64(f.element_bytes))
            places = [
                f.b.add(f.plus(f.plus(sums, sum_bytes, head), d, 4), _I64(4 * LANES * part))
                for head in heads
                for part in range(count)
            ]

            def step(i: Any, *totals: Any) -> list[Any]:
                offset = f.b.add(begin, f.b.mul(i, value_bytes))
                place = f.b.add(values, offset)
                vectors = [
                    f.elements(f.b.add(place, _I64(LANES * f.element_bytes * part)))
                    for part in range(count)
                ]
                f.fetch(f.b.add(ahead, offset), count * LANES * f.element_bytes)
                splats = [
                    f.splat(f.floats(f.plus(f.plus(weights, weight_bytes, head), i, 4), _FLOAT))
                    for head in heads
                ]
                pairs = [(splat, vector) for splat in splats for vector in vectors]
                return [
                    f.plus_product(total, *pair) for total, pair in zip(totals, pairs, strict=True)
                ]

            _, *totals = f.loop(_I64(0), num_values, 1, step, *map(f.floats, places))
            for total, place in zip(totals, places, strict=True):
                f.store(total, place)

        return one_chunk

    (done,) = f.loop(_I64(0), head_dim, _CHUNK * LANES, some(_CHUNK))
    f.loop(done, head_dim, LANES, some(1))
    f.b.ret_void()
    return f.function


def _call_one_of(
    write: Callable[[Any, int, int], Any], context: Any, builder: Any, arguments: Any
) -> Any:
    """Call what ``write`` makes for the first two arguments, a kind and a number of heads."""
    kind, num_heads, *rest = arguments
    done = builder.append_basic_block()
    choice = builder.switch(builder.add(builder.mul(kind, _I64(_MAX_HEADS)), num_heads), done)
    for each_kind in (FLOAT32, BFLOAT16, INT8):
        for count in range(1, _MAX_HEADS + 1):
            block = builder.append_basic_block()
            choice.add_case(_I64(each_kind * _MAX_HEADS + count), block)
            builder.position_at_end(block)
            builder.call(write(builder.module, each_kind, count), rest)
            builder.branch(done)
    builder.position_at_end(done)
    return context.get_dummy_value()


@intrinsic
def _score(
    typing: Any,
    kind: Any,
    num_heads: Any,
    q: Any,
    keys: Any,
    num_keys: Any,
    head_dim: Any,
    scores: Any,
    score_bytes: Any,
    ahead: Any,
) -> Any:
    """See _write_scores."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _call_one_of(_write_scores, context, builder, arguments)

    return types.void(*[types.int64] * 9), generate


@intrinsic
def _sum(
    typing: Any,
    kind: Any,
    num_heads: Any,
    weights: Any,
    values: Any,
    num_values: Any,
    head_dim: Any,
    sums: Any,
    weight_bytes: Any,
    sum_bytes: Any,
    ahead: Any,
) -> Any:
    """See _write_sums."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _call_one_of(_write_sums, context, builder, arguments)

    return types.void(*[types.int64] * 10), generate


@intrinsic
def _scratch(typing: Any) -> Any:
    """Address of [_MAX_HEADS, PIECE_TOKENS] float32 that lasts as long as the function runs."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        scores = cgutils.alloca_once(builder, ir.ArrayType(_FLOAT, _MAX_HEADS * PIECE_TOKENS))
        return builder.ptrtoint(scores, context.get_value_type(types.int64))

    return types.int64(), generate


@intrinsic
def _count(typing: Any, address: Any) -> Any:
    """Add one to the integer there; returns what it was. Orders what threads wrote before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], _I64.as_pointer())
        return builder.atomic_rmw("add", place, _I64(1), "acq_rel")

    return types.int64(types.int64), generate


@intrinsic
def _words_at(typing: Any, address: Any) -> Any:
    """The 64-bit integers at an address, as a pointer."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.int64)(types.int64), generate


@njit(**FLOAT_RULES)
def _multiply(x: NDArray[np.float32], scales: NDArray[np.float32]) -> None:
    for i in range(len(x)):
        x[i] *= scales[i]


@njit(**FLOAT_RULES)
def _fill(x: NDArray[np.float32], number: np.float32) -> None:
    for i in range(len(x)):
        x[i] = number


@njit(**FLOAT_RULES)
def _softmax(scores: NDArray[np.float32], scale: np.float32, state: NDArray[np.float32]) -> None:
    """Scores to weights, in place, and their state."""
    largest = scores[0]
    for i in range(len(scores)):
        largest = max(largest, scores[i])
    largest *= scale
    total = np.float32(0.0)
    for i in range(len(scores)):
        weight = exp(scores[i] * scale - largest)
        scores[i] = weight
        total += weight
    state[0], state[1] = largest, total


@njit(**FLOAT_RULES)
def _merge(pieces: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """pieces: [num_pieces, head_dim + STATE_FLOATS]."""
    head_dim = len(out)
    largest, total = pieces[0, head_dim], np.float32(0.0)
    for piece in range(len(pieces)):
        largest = max(largest, pieces[piece, head_dim])
    _fill(out, np.float32(0.0))
    for piece in range(len(pieces)):
        weight = exp(pieces[piece, head_dim] - largest)
        total += weight * pieces[piece, head_dim + 1]
        for d in range(head_dim):
            out[d] += weight * pieces[piece, d]
    for d in range(head_dim):
        out[d] /= total


def _attend(task: Any) -> None:
    """See diptych.engine.paged_decode.PagedDecode, which fills the task."""
    num_rows, num_heads, num_kv_heads, head_dim = task[2], task[3], task[4], task[5]
    kind, element_bytes, block_size, run_bytes = task[6], task[7], task[8], task[9]
    scales_at, runs_per_block, first_run = task[10], task[11], task[12]
    num_columns, window, max_pieces = task[13], task[14], task[15]
    q_at, pool_at, out_at, done_at = task[16], task[17], task[21], task[23]
    tables = carray(_words_at(task[18]), (num_rows, num_columns))
    context_lens = carray(_words_at(task[19]), (num_rows,))
    scale = carray(floats_at(task[20]), (1,))[0]
    out = carray(floats_at(out_at), (num_rows, num_heads, head_dim))
    pieces_shape = (num_rows, num_heads, max_pieces, head_dim + STATE_FLOATS)
    pieces = carray(floats_at(task[22]), pieces_shape)
    done = carray(_words_at(done_at), (num_rows, num_kv_heads))
    group = num_heads // num_kv_heads
    scores_at = _scratch()
    scores = carray(floats_at(scores_at), (_MAX_HEADS, PIECE_TOKENS))
    item = next_item(task)
    while item < task[NUM_ITEMS]:
        piece, place = item % max_pieces, item // max_pieces
        row, kv_head = place // num_kv_heads, place % num_kv_heads
        item = next_item(task)
        begin = max(0, context_lens[row] - window)
        num_pieces = (context_lens[row] - begin + PIECE_TOKENS - 1) // PIECE_TOKENS
        if piece >= num_pieces:
            continue
        begin += piece * PIECE_TOKENS
        end = min(begin + PIECE_TOKENS, context_lens[row])
        keys_at = pool_at + (first_run + kv_head) * run_bytes
        values_at = keys_at + num_kv_heads * run_bytes
        for first in range(kv_head * group, (kv_head + 1) * group, _MAX_HEADS):
            count = min(_MAX_HEADS, (kv_head + 1) * group - first)
            for part in range(2):
                part_at = values_at if part else keys_at
                if part:
                    for i in range(count):
                        target = pieces[row, first + i, piece]
                        _softmax(scores[i, : end - begin], scale, target[head_dim:])
                        _fill(target[:head_dim], np.float32(0.0))
                position = begin
                while position < end:
                    block, within = position // block_size, position % block_size
                    size = min(block_size - within, end - position)
                    run = part_at + tables[row, block] * runs_per_block * run_bytes
                    if position + size < end:
                        following = part_at + tables[row, block + 1] * runs_per_block * run_bytes
                    else:
                        following = values_at + (
                            tables[row, begin // block_size] * runs_per_block * run_bytes
                        )
                    offset = within * head_dim * element_bytes
                    at = position - begin
                    if kind == INT8:
                        scales = carray(floats_at(run + scales_at), (block_size,))
                        scales = scales[within : within + size]
                    if part:
                        if kind == INT8:
                            for i in range(count):
                                _multiply(scores[i, at : at + size], scales)
                        _sum(
                            kind,
                            count,
                            scores_at + 4 * at,
                            run + offset,
                            size,
                            head_dim,
                            task[22]
                            + 4
                            * ((row * num_heads + first) * max_pieces + piece)
                            * (head_dim + STATE_FLOATS),
                            4 * PIECE_TOKENS,
                            4 * max_pieces * (head_dim + STATE_FLOATS),
                            following,
                        )
                    else:
                        _score(
                            kind,
                            count,
                            q_at + 4 * (row * num_heads + first) * head_dim,
                            run + offset,
                            size,
                            head_dim,
                            scores_at + 4 * at,
                            4 * PIECE_TOKENS,
                            following,
                        )
                        if kind == INT8:
                            for i in range(count):
                                _multiply(scores[i, at : at + size], scales)
                    position += size
        if num_pieces > 1 and _count(done_at + 8 * place) < num_pieces - 1:
            continue
        done[row, kv_head] = 0
        for head in range(kv_head * group, (kv_head + 1) * group):
            _merge(pieces[row, head, :num_pieces], out[row, head])


attend = Loop(_attend)
