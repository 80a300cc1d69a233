"""Softmax of attention scores where each row sees a range of keys. float32 only."""

from typing import Any

import numpy as np
from numba import carray, njit  # type: ignore[attr-defined]
from numpy.typing import NDArray

from diptych.engine.kernels.exponent import exp
from diptych.engine.kernels.loop import (
    FLOAT_RULES,
    NUM_ITEMS,
    Loop,
    float_of_bits,
    floats_at,
    next_item,
)

_Row = NDArray[np.float32]


@njit(**FLOAT_RULES)  # type: ignore[untyped-decorator]
def _largest(x: _Row) -> np.float32:
    """A NaN is larger than all. By integers of the same order: a loop over floats would
    not vectorise."""
    bits, magnitude = x.view(np.int32), np.int32(0x7FFFFFFF)
    best = ~magnitude
    for i in range(len(bits)):
        best = max(best, bits[i] ^ ((bits[i] >> np.int32(31)) & magnitude))
    largest: np.float32 = float_of_bits(best ^ ((best >> np.int32(31)) & magnitude))
    return largest


@njit(**FLOAT_RULES)  # type: ignore[untyped-decorator]
def _weigh(scores: _Row, scale: np.float32) -> np.float32:
    """Scores to weights, in place; returns their sum."""
    largest = _largest(scores) * scale
    total = np.float32(0.0)
    for i in range(len(scores)):
        weight = exp(scores[i] * scale - largest)
        scores[i] = weight
        total += weight
    return total


def _softmax(task: Any) -> None:
    """Scores of rows to weights not yet divided by their sums, and the sums.

    Row r belongs to token t = r // rows_per_token and sees columns begin + t (0 if
    that is less) to end + t; the others get no weight, whatever they hold.
    """
    rows_per_item, num_rows, num_columns, rows_per_token = task[2], task[3], task[4], task[5]
    begin, end = task[6], task[7]
    scores = carray(floats_at(task[8]), (num_rows, num_columns))
    scale = carray(floats_at(task[9]), (1,))[0]
    sums = carray(floats_at(task[10]), (num_rows,))
    item = next_item(task)
    while item < task[NUM_ITEMS]:
        for row in range(item * rows_per_item, min((item + 1) * rows_per_item, num_rows)):
            token = row // rows_per_token
            first, last = max(0, begin + token), end + token
            line = scores[row]
            for i in range(first):
                line[i] = np.float32(0.0)
            sums[row] = _weigh(line[first:last], scale)
            for i in range(last, num_columns):
                line[i] = np.float32(0.0)
        item = next_item(task)


softmax = Loop(_softmax)
