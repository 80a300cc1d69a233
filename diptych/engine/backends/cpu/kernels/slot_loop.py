"""Writes rows of numbers to slots of the KV cache, each where its index says. float32 only."""

from typing import Any

from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from diptych.engine.backends.cpu.kernels.loop import (
    FIRST_ARGUMENT,
    NUM_ITEMS,
    Call,
    Loop,
    floats_at,
    next_item,
    words_at,
)

_ITEM_SIZE = 1 << 13  # numbers

# What a task holds.
_ROWS_PER_ITEM, _NUM_ROWS, _SIZE, _OFFSET, _ROWS, _INDICES, _SLOTS = range(
    FIRST_ARGUMENT, FIRST_ARGUMENT + 7
)


def write_slots(rows: Tensor, indices: Tensor, offset: int, slots: Tensor) -> Call:
    """slots[indices + offset] = rows. rows: [N, size]; indices: [N] int64; slots: [S, size].

    All contiguous, on the host; no index twice.
    """
    num_rows, size = rows.shape
    rows_per_item = max(1, _ITEM_SIZE // size)
    num_items = -(-num_rows // rows_per_item)
    return _write.call(num_items, rows_per_item, num_rows, size, offset, rows, indices, slots)


def _write_rows(task: Any) -> None:
    rows_per_item, num_rows = task[_ROWS_PER_ITEM], task[_NUM_ROWS]
    size, offset = task[_SIZE], task[_OFFSET]
    rows = carray(floats_at(task[_ROWS]), (num_rows, size))
    indices = carray(words_at(task[_INDICES]), (num_rows,))
    item = next_item(task)
    while item < task[NUM_ITEMS]:
        for row in range(item * rows_per_item, min((item + 1) * rows_per_item, num_rows)):
            slot = carray(floats_at(task[_SLOTS] + 4 * size * (indices[row] + offset)), (size,))
            for i in range(size):
                slot[i] = rows[row, i]
        item = next_item(task)


_write = Loop(_write_rows)
