"""Decode attention over KV blocks where they lie; each block is streamed once.

An item of work is a piece of one row's context for one key-value head, with all the
query heads that share it. Pieces begin and end at places that depend on the row
alone, and whoever does a row's last piece merges them in order: a row's result has
the same bits whatever the other rows are and however many threads there are.

While one run of a block is used, a later one is fetched, across the end of a piece
too: blocks are scattered, which the processor's own prefetching does not see.
"""

# numba's own types do not tell what compiled functions and intrinsics take.
# mypy: disable-error-code="attr-defined,no-untyped-call,no-any-return,untyped-decorator"

from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from diptych.engine.backends.cpu.kernels.exponent import exp
from diptych.engine.backends.cpu.kernels.loop import (
    FIRST_ARGUMENT,
    FLOAT_RULES,
    NUM_ITEMS,
    Loop,
    floats_at,
    next_item,
    words_at,
)
from diptych.engine.backends.cpu.kernels.paged_tiles import (
    HEADS,
    TILE_KEYS,
    fetch_line,
    score,
    soften,
    sum_values,
)
from diptych.engine.backends.cpu.kernels.processor import LANES
from diptych.engine.backends.cpu.kernels.vector_function import (
    BFLOAT16,
    FLOAT,
    FLOAT32,
    I64,
    INT8,
)

__all__ = ["BFLOAT16", "FLOAT32", "INT8", "LANES", "PIECE_TOKENS", "STATE_FLOATS", "attend"]

PIECE_TOKENS = 128
STATE_FLOATS = 2  # kept of a piece besides its sums: largest score, sum of the weights

_SCRATCH_FLOATS = (PIECE_TOKENS + TILE_KEYS + 2) * HEADS  # scores and their state
_STATE_AT = 4 * (PIECE_TOKENS + TILE_KEYS) * HEADS

# What a task holds; see diptych.engine.backends.cpu.paged_decode.PagedDecode, which fills it.
(
    _NUM_COLUMNS,
    _MAX_PIECES,
    _TABLES,
    _CONTEXT_LENS,
    _PIECES,
    _NUM_DONE,
    _NUM_HEADS,
    _NUM_KV_HEADS,
    _HEAD_DIM,
    _KIND,
    _ELEMENT_BYTES,
    _BLOCK_SIZE,
    _RUN_BYTES,
    _SCALES_OFFSET,
    _RUNS_PER_BLOCK,
    _FIRST_RUN,
    _VALUE_RUNS,
    _RUNS_AHEAD,
    _WINDOW,
    _QUERIES,
    _POOL,
    _SCALE,
    _OUT,
) = range(FIRST_ARGUMENT, FIRST_ARGUMENT + 23)


def _count_code(_typing: Any, address: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], I64.as_pointer())
        return builder.atomic_rmw("add", place, I64(1), "acq_rel")

    return types.int64(types.int64), generate


def _scratch_code(_typing: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        place = cgutils.alloca_once(builder, FLOAT, I64(_SCRATCH_FLOATS))
        return builder.ptrtoint(place, context.get_value_type(types.int64))

    return types.int64(), generate


_scratch: Any = intrinsic(_scratch_code)  # address; lasts as long as the function runs
# Adds one to the integer there; returns what it was. Orders what threads wrote before.
_count: Any = intrinsic(_count_code)


@njit
def _span(task: Any, item: int) -> tuple[int, int, int, int]:
    """Row, key-value head, and the positions where the piece begins and ends.

    A row with fewer pieces than the longest has empty ones.
    """
    place, piece = item // task[_MAX_PIECES], item % task[_MAX_PIECES]
    row, kv_head = place // task[_NUM_KV_HEADS], place % task[_NUM_KV_HEADS]
    context_len = words_at(task[_CONTEXT_LENS])[row]
    begin = max(0, context_len - task[_WINDOW]) + piece * PIECE_TOKENS
    return row, kv_head, begin, min(begin + PIECE_TOKENS, context_len)


@njit
def _run(task: Any, row: int, kv_head: int, values: int, column: int) -> int:
    """Address of the keys (or values) of a row's block."""
    block = words_at(task[_TABLES])[row * task[_NUM_COLUMNS] + column]
    run = task[_FIRST_RUN] + values * task[_VALUE_RUNS] + kv_head
    return task[_POOL] + (block * task[_RUNS_PER_BLOCK] + run) * task[_RUN_BYTES]


@njit
def _ahead(
    task: Any, span: tuple[int, int, int, int], following: tuple[int, int, int, int], index: int
) -> int:
    """Address of the run that is ``index`` runs behind the first of ``span``.

    Runs are used keys first, then values, then the keys of the following span.
    """
    row, kv_head, begin, end = span
    first = begin // task[_BLOCK_SIZE]
    num_columns = (end - 1) // task[_BLOCK_SIZE] + 1 - first
    if index < 2 * num_columns:
        values = int(index >= num_columns)
        return _run(task, row, kv_head, values, first + index - values * num_columns)
    row, kv_head, begin, end = following
    first, last = begin // task[_BLOCK_SIZE], (end - 1) // task[_BLOCK_SIZE]
    return _run(task, row, kv_head, 0, min(first + index - 2 * num_columns, last))


@njit(**FLOAT_RULES)
def _scale_heads(weights_at: int, scales_at: int, num_keys: int) -> None:
    """Those of each key times its scale."""
    weights = carray(floats_at(weights_at), (num_keys, HEADS))
    scales = carray(floats_at(scales_at), (num_keys,))
    for key in range(num_keys):
        for head in range(HEADS):
            weights[key, head] *= scales[key]


@njit(**FLOAT_RULES)
def _attend_heads(
    task: Any,
    span: tuple[int, int, int, int],
    following: tuple[int, int, int, int],
    first_head: int,
    num_heads: int,
    scratch: int,
) -> None:
    """Sums and state of one piece, for up to HEADS query heads."""
    row, kv_head, begin, end = span
    kind, head_dim, block_size = task[_KIND], task[_HEAD_DIM], task[_BLOCK_SIZE]
    head = row * task[_NUM_HEADS] + first_head
    queries = task[_QUERIES] + 4 * head * head_dim
    piece_bytes = 4 * (head_dim + STATE_FLOATS)
    head_bytes = task[_MAX_PIECES] * piece_bytes
    begin_of_row = max(0, words_at(task[_CONTEXT_LENS])[row] - task[_WINDOW])
    sums = task[_PIECES] + head * head_bytes + (begin - begin_of_row) // PIECE_TOKENS * piece_bytes
    index = task[_RUNS_AHEAD]
    for values in range(2):
        position = begin
        while position < end:
            column, within = position // block_size, position % block_size
            size = min(block_size - within, end - position)
            run = _run(task, row, kv_head, values, column)
            elements = run + within * head_dim * task[_ELEMENT_BYTES]
            weights = scratch + 4 * HEADS * (position - begin)
            ahead = _ahead(task, span, following, index)
            index += 1
            scales = run + task[_SCALES_OFFSET] + 4 * within
            if kind == INT8:
                fetch_line(ahead + task[_SCALES_OFFSET])
            if values:
                if kind == INT8:
                    _scale_heads(weights, scales, size)
                sum_values(
                    kind, num_heads, weights, elements, size, head_dim, sums, head_bytes, ahead
                )
            else:
                score(kind, num_heads, queries, elements, size, head_dim, weights, ahead)
                if kind == INT8:
                    _scale_heads(weights, scales, size)
            position += size
        if not values:
            num_tiles = (end - begin + TILE_KEYS - 1) // TILE_KEYS
            scores = carray(floats_at(scratch), (num_tiles * TILE_KEYS, HEADS))
            scores[end - begin :] = -np.inf
            soften(scratch, num_tiles, task[_SCALE], scratch + _STATE_AT)
            state = carray(floats_at(scratch + _STATE_AT), (STATE_FLOATS, HEADS))
            for i in range(num_heads):
                piece = carray(floats_at(sums + i * head_bytes), (head_dim + STATE_FLOATS,))
                piece[:head_dim] = 0
                piece[head_dim], piece[head_dim + 1] = state[0, i], state[1, i]


@njit(**FLOAT_RULES)
def _merge(pieces: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """pieces: [num_pieces, head_dim + STATE_FLOATS]; out: [head_dim]."""
    head_dim = len(out)
    largest, total = pieces[0, head_dim], np.float32(0.0)
    for piece in range(len(pieces)):
        largest = max(largest, pieces[piece, head_dim])
    for d in range(head_dim):
        out[d] = 0.0
    for piece in range(len(pieces)):
        weight = exp(pieces[piece, head_dim] - largest)
        total += weight * pieces[piece, head_dim + 1]
        for d in range(head_dim):
            out[d] += weight * pieces[piece, d]
    for d in range(head_dim):
        out[d] /= total


@njit(**FLOAT_RULES)
def _merge_heads(task: Any, row: int, first_head: int, last_head: int, num_pieces: int) -> None:
    head_dim, max_pieces = task[_HEAD_DIM], task[_MAX_PIECES]
    for i in range(first_head, last_head):
        head = row * task[_NUM_HEADS] + i
        pieces_at = task[_PIECES] + 4 * head * max_pieces * (head_dim + STATE_FLOATS)
        pieces = carray(floats_at(pieces_at), (num_pieces, head_dim + STATE_FLOATS))
        out = carray(floats_at(task[_OUT] + 4 * head * head_dim), (head_dim,))
        _merge(pieces, out)


def _attend(task: Any) -> None:
    """Pieces, as long as there are any."""
    group = task[_NUM_HEADS] // task[_NUM_KV_HEADS]
    scratch = _scratch()
    item = next_item(task)
    while item < task[NUM_ITEMS]:
        span = _span(task, item)
        place = item // task[_MAX_PIECES]
        item = next_item(task)
        row, kv_head, begin, end = span
        if begin >= end:
            continue
        following = span
        if item < task[NUM_ITEMS]:
            following = _span(task, item)
            if following[2] >= following[3]:
                following = span
        first_head, last_head = kv_head * group, (kv_head + 1) * group
        for head in range(first_head, last_head, HEADS):
            num_heads = min(HEADS, last_head - head)
            _attend_heads(task, span, following, head, num_heads, scratch)
        context_len = words_at(task[_CONTEXT_LENS])[row]
        length = min(context_len, task[_WINDOW])
        num_pieces = (length + PIECE_TOKENS - 1) // PIECE_TOKENS
        done = task[_NUM_DONE] + 8 * place
        if num_pieces == 1 or _count(done) == num_pieces - 1:
            words_at(done)[0] = 0
            _merge_heads(task, row, first_head, last_head, num_pieces)


attend = Loop(_attend)
