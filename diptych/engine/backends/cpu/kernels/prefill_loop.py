"""Prefill attention as one compiled loop over tiles of queries; see prefill_tiles.

An item of work is a tile of one key-value head: all query heads that share it, of
consecutive tokens. It goes over the keys that its rows see in pieces of TILE_KEYS and
keeps a running softmax (FlashAttention). Pieces end at positions that are multiples of
TILE_KEYS: a row's result has the same bits however the prompt is cut into chunks.
"""

# mypy: disable-error-code="untyped-decorator"

from typing import Any

import numpy as np
from numba import carray, njit  # type: ignore[attr-defined]

from diptych.engine.backends.cpu.kernels.loop import (
    FIRST_ARGUMENT,
    NUM_ITEMS,
    Loop,
    floats_at,
    next_item,
    words_at,
)
from diptych.engine.backends.cpu.kernels.prefill_tiles import (
    INNER,
    NO_SCORE,
    TILE_KEYS,
    TILE_ROWS,
    give,
    hide,
    score,
    score_more,
    soften,
    sum_values,
    take,
)
from diptych.engine.backends.cpu.kernels.processor import LANES

__all__ = ["TILE_ROWS", "attend", "scratch_bytes"]

# What a task holds; TiledAttention (backends.cpu.prefill_attention) fills it.
(
    _NUM_TOKENS,
    _NUM_HEADS,
    _NUM_KV_HEADS,
    _HEAD_DIM,
    _START,
    _FIRST,
    _WINDOW,
    _Q,
    _OUT,
    _SCALE,
    _KEYS,
    _VALUES,
    _HEAD_BYTES,
    _PLACES,
    _SCRATCHES,
    _SCRATCH_BYTES,
    _NUM_TAKEN,
) = range(FIRST_ARGUMENT, FIRST_ARGUMENT + 17)

_LINE = 4 * TILE_ROWS  # bytes of one float32 for each row
_STATE, _LIMITS, _ROWS = 3, 2, 2  # lines of a scratch


def scratch_bytes(head_dim: int) -> int:
    """What each thread needs."""
    return _LINE * (2 * head_dim + TILE_KEYS + _STATE + _LIMITS + _ROWS)


@njit
def _rows(task: Any, first: int, kv_head: int, rows_at: int, limits_at: int) -> None:
    """Byte offsets in q of a tile's rows, and the positions they see.

    Behind the last row it counts again.
    """
    group = task[_NUM_HEADS] // task[_NUM_KV_HEADS]
    last = task[_NUM_TOKENS] * group - 1
    rows = carray(words_at(rows_at), (TILE_ROWS,))
    limits = carray(floats_at(limits_at), (2, TILE_ROWS)).view(np.int32)
    for i in range(TILE_ROWS):
        row = min(first + i, last)
        token, head = row // group, kv_head * group + row % group
        rows[i] = 4 * task[_HEAD_DIM] * (token * task[_NUM_HEADS] + head)
        end = task[_START] + token + 1
        limits[0, i] = max(0, end - task[_WINDOW])
        limits[1, i] = end


@njit
def _attend_tile(task: Any, first: int, kv_head: int, scratch: int) -> None:
    head_dim = task[_HEAD_DIM]
    group = task[_NUM_HEADS] // task[_NUM_KV_HEADS]
    num_rows = min(TILE_ROWS, task[_NUM_TOKENS] * group - first)
    variant = (num_rows - 1) // LANES  # vectors less one
    queries, sums = scratch, scratch + _LINE * head_dim
    scores = sums + _LINE * head_dim
    state_at = scores + _LINE * TILE_KEYS
    limits_at = state_at + _LINE * _STATE
    rows_at = limits_at + _LINE * _LIMITS
    _rows(task, first, kv_head, rows_at, limits_at)
    take(variant, task[_Q], rows_at, head_dim, task[_SCALE], queries)
    carray(floats_at(sums), (TILE_ROWS * head_dim,))[:] = np.float32(0)
    state = carray(floats_at(state_at), (_STATE, TILE_ROWS))
    state[0, :], state[1, :] = np.float32(NO_SCORE), np.float32(0)

    first_pos = task[_START] + first // group
    last_pos = task[_START] + (first + num_rows - 1) // group
    keys = task[_KEYS] + kv_head * task[_HEAD_BYTES]
    values = task[_VALUES] + kv_head * task[_HEAD_BYTES]
    begin = max(0, first_pos + 1 - task[_WINDOW])
    while begin <= last_pos:
        end = min(begin // TILE_KEYS * TILE_KEYS + TILE_KEYS, last_pos + 1)
        size = end - begin
        places = task[_PLACES] + 8 * (begin - task[_FIRST])
        score(variant, queries, places, keys, size, min(INNER, head_dim), scores)
        for d in range(INNER, head_dim, INNER):
            inner = min(INNER, head_dim - d)
            part = queries + _LINE * d
            score_more(variant, part, places, keys + 4 * d, size, inner, scores)
        if end > first_pos + 1 or begin <= last_pos - task[_WINDOW]:
            hide(scores, size, begin, limits_at)
        soften(variant, scores, size, state_at)
        factors = state_at + 2 * _LINE
        sum_values(variant, scores, places, values, size, head_dim, factors, sums)
        begin = end
    give(variant, sums, state_at + _LINE, head_dim, task[_OUT], rows_at)


def _attend(task: Any) -> None:
    """Tiles, as long as there are any; those that see most first."""
    num_rows = task[_NUM_TOKENS] * (task[_NUM_HEADS] // task[_NUM_KV_HEADS])
    num_tiles = (num_rows + TILE_ROWS - 1) // TILE_ROWS
    scratch = task[_SCRATCHES] + next_item(words_at(task[_NUM_TAKEN])) * task[_SCRATCH_BYTES]
    item = next_item(task)
    while item < task[NUM_ITEMS]:
        tile = num_tiles - 1 - item % num_tiles
        _attend_tile(task, tile * TILE_ROWS, item // num_tiles, scratch)
        item = next_item(task)


# Sums may not be reordered: rounding by a large number would be lost.
attend = Loop(_attend, {"error_model": "numpy"})
