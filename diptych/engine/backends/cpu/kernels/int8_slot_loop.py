"""Writes keys and values into int8 blocks, each token and head with a scale of its own.

The same bits as :func:`diptych.engine.backends.torch.int8_linear.quantise`, in one pass
instead of a dozen of torch's operators on a few rows each.
"""

# numba's own types do not tell what compiled functions and intrinsics take.
# mypy: disable-error-code="attr-defined,no-untyped-call,untyped-decorator"

from typing import Any

import numpy as np
from numba import carray, njit
from torch import Tensor

from diptych.engine.backends.cpu.kernels.loop import (
    FIRST_ARGUMENT,
    NUM_ITEMS,
    Call,
    Loop,
    float_of_bits,
    floats_at,
    int8s_at,
    int32s_at,
    next_item,
    words_at,
)

# What a task holds; slots number those of all runs, one behind the other.
_HEAD_DIM, _BLOCK_SIZE, _RUN_BYTES, _SCALES_OFFSET, _OFFSET, _ROWS, _INDICES, _RUNS = range(
    FIRST_ARGUMENT, FIRST_ARGUMENT + 8
)
_SCALE_BYTES = 4
_INFINITY = 0x7F800000  # bits of the float32
_TINY = np.float32(1e-30)  # as of quantise


def write_int8_slots(
    rows: Tensor, indices: Tensor, offset: int, runs: Tensor, block_size: int
) -> Call:
    """Quantise rows into slots ``indices + offset``, counted through all runs.

    rows: [N, head_dim] float32; indices: [N] int64, no index twice; runs: [R, run_bytes]
    int8, as :mod:`diptych.engine.kv.cache` lays them out. All contiguous, on the host.
    """
    num_rows, head_dim = rows.shape
    run_bytes = runs.shape[1]
    scales_offset = run_bytes - block_size * _SCALE_BYTES
    return _write.call(
        num_rows, head_dim, block_size, run_bytes, scales_offset, offset, rows, indices, runs
    )


@njit(error_model="numpy")
def _quantise(row: int, size: int, values_at: int, scale_at: int) -> None:
    """Addresses of float32 elements, of int8 elements and of their float32 scale."""
    bits = carray(int32s_at(row), (size,))
    elements = carray(floats_at(row), (size,))
    values = carray(int8s_at(values_at), (size,))
    largest = np.int32(0)
    for i in range(size):  # as integers, magnitudes keep their order, NaN above all
        largest = max(largest, bits[i] & np.int32(0x7FFFFFFF))
    if largest >= _INFINITY:
        values[:] = 0
        floats_at(scale_at)[0] = np.float32(np.nan)
        return
    scale = float_of_bits(largest) / np.float32(127)
    ratio = np.float32(1) / scale if scale > _TINY else np.float32(0)
    for i in range(size):
        values[i] = np.int8(np.rint(elements[i] * ratio))
    floats_at(scale_at)[0] = scale


def _write_rows(task: Any) -> None:
    """Rows, as long as there are any."""
    head_dim, block_size = task[_HEAD_DIM], task[_BLOCK_SIZE]
    item = next_item(task)
    while item < task[NUM_ITEMS]:
        slot = words_at(task[_INDICES])[item] + task[_OFFSET]
        run = task[_RUNS] + slot // block_size * task[_RUN_BYTES]
        within = slot % block_size
        _quantise(
            task[_ROWS] + 4 * item * head_dim,
            head_dim,
            run + within * head_dim,
            run + task[_SCALES_OFFSET] + 4 * within,
        )
        item = next_item(task)


# Every operation is rounded by itself, as torch's are.
_write = Loop(_write_rows, {"error_model": "numpy"})
