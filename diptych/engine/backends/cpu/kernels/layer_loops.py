"""A layer's row-wise operations, each in one pass over its rows. float32 only.

An item is ``rows_per_item`` rows. Tensors are contiguous; their shapes are given where
a loop takes them out of its task.
"""

from typing import Any

import numpy as np
from numba import carray, njit  # type: ignore[attr-defined]
from numpy.typing import NDArray

from diptych.engine.backends.cpu.kernels.exponent import exp
from diptych.engine.backends.cpu.kernels.loop import (
    FIRST_ARGUMENT,
    FLOAT_RULES,
    NUM_ITEMS,
    Loop,
    floats_at,
    next_item,
)

_Row = NDArray[np.float32]

_ONE = np.float32(1.0)

# What a task holds: of every loop first, then of each.
_ROWS_PER_ITEM, _NUM_ROWS, _SIZE = range(FIRST_ARGUMENT, FIRST_ARGUMENT + 3)
_THEN = FIRST_ARGUMENT + 3
_NORM_X, _NORM_WEIGHT, _NORM_EPS, _NORM_OUT = range(_THEN, _THEN + 4)
_SUM_X, _SUM_Y, _SUM_Y_WEIGHT, _SUM_WEIGHT, _SUM_EPS, _SUM_OUT = range(_THEN, _THEN + 6)
_IS_GELU, _GATE_UP, _GATED = range(_THEN, _THEN + 3)
_NUM_HEADS, _NUM_KV_HEADS, _HEAD_DIM = range(_NUM_ROWS + 1, _NUM_ROWS + 4)
_QKV, _COS, _SIN, _Q_WEIGHT, _K_WEIGHT, _HAS_NORM, _ROTATE_EPS, _Q, _KV = range(
    _HEAD_DIM + 1, _HEAD_DIM + 10
)


@njit(**FLOAT_RULES)  # type: ignore[untyped-decorator]
def _inverse_rms(x: _Row, eps: np.float32) -> np.float32:
    total = np.float32(0.0)
    for i in range(len(x)):
        total += x[i] * x[i]
    inverse: np.float32 = _ONE / np.sqrt(total / np.float32(len(x)) + eps)
    return inverse


@njit(**FLOAT_RULES)  # type: ignore[untyped-decorator]
def _norm_row(x: _Row, weight: _Row, eps: np.float32, out: _Row) -> None:
    scale = _inverse_rms(x, eps)
    for i in range(len(x)):
        out[i] = x[i] * scale * weight[i]


@njit(**FLOAT_RULES)  # type: ignore[untyped-decorator]
def _rotate_head(x: _Row, scale: np.float32, weight: _Row, cos: _Row, sin: _Row, out: _Row) -> None:
    half = len(cos)
    for i in range(half):
        first = x[i] * (scale * weight[i])
        second = x[half + i] * (scale * weight[half + i])
        out[i] = first * cos[i] - second * sin[i]
        out[half + i] = second * cos[i] + first * sin[i]


def _norm(task: Any) -> None:
    """out = norm(x)."""
    rows_per_item, num_rows, size = task[_ROWS_PER_ITEM], task[_NUM_ROWS], task[_SIZE]
    x = carray(floats_at(task[_NORM_X]), (num_rows, size))
    weight = carray(floats_at(task[_NORM_WEIGHT]), (size,))
    eps = carray(floats_at(task[_NORM_EPS]), (1,))[0]
    out = carray(floats_at(task[_NORM_OUT]), (num_rows, size))
    item = next_item(task)
    while item < task[NUM_ITEMS]:
        for row in range(item * rows_per_item, min((item + 1) * rows_per_item, num_rows)):
            _norm_row(x[row], weight, eps, out[row])
        item = next_item(task)


def _add_norm(task: Any) -> None:
    """x += y, or norm(y) where it has a weight; out = norm(x) where that has one."""
    rows_per_item, num_rows, size = task[_ROWS_PER_ITEM], task[_NUM_ROWS], task[_SIZE]
    x = carray(floats_at(task[_SUM_X]), (num_rows, size))
    y = carray(floats_at(task[_SUM_Y]), (num_rows, size))
    y_weight = carray(floats_at(task[_SUM_Y_WEIGHT]), (size,))  # address 0: none
    weight = carray(floats_at(task[_SUM_WEIGHT]), (size,))  # address 0: none
    eps = carray(floats_at(task[_SUM_EPS]), (1,))[0]
    out = carray(floats_at(task[_SUM_OUT]), (num_rows, size))
    item = next_item(task)
    while item < task[NUM_ITEMS]:
        for row in range(item * rows_per_item, min((item + 1) * rows_per_item, num_rows)):
            total, added = x[row], y[row]
            if task[_SUM_Y_WEIGHT]:
                scale = _inverse_rms(added, eps)
                for i in range(size):
                    total[i] += added[i] * scale * y_weight[i]
            else:
                for i in range(size):
                    total[i] += added[i]
            if task[_SUM_WEIGHT]:
                _norm_row(total, weight, eps, out[row])
        item = next_item(task)


def _rotate(task: Any) -> None:
    """Queries and keys normed (where there is a norm) and rotated; values copied."""
    rows_per_item, num_rows = task[_ROWS_PER_ITEM], task[_NUM_ROWS]
    num_heads, num_kv_heads, head_dim = task[_NUM_HEADS], task[_NUM_KV_HEADS], task[_HEAD_DIM]
    qkv = carray(floats_at(task[_QKV]), (num_rows, num_heads + 2 * num_kv_heads, head_dim))
    cos = carray(floats_at(task[_COS]), (num_rows, head_dim // 2))
    sin = carray(floats_at(task[_SIN]), (num_rows, head_dim // 2))
    q_weight = carray(floats_at(task[_Q_WEIGHT]), (head_dim,))
    k_weight = carray(floats_at(task[_K_WEIGHT]), (head_dim,))
    has_norm = task[_HAS_NORM]
    eps = carray(floats_at(task[_ROTATE_EPS]), (1,))[0]
    q = carray(floats_at(task[_Q]), (num_rows, num_heads, head_dim))
    kv = carray(floats_at(task[_KV]), (num_rows, 2, num_kv_heads, head_dim))
    item = next_item(task)
    while item < task[NUM_ITEMS]:
        for row in range(item * rows_per_item, min((item + 1) * rows_per_item, num_rows)):
            for head in range(num_heads):
                x = qkv[row, head]
                scale = _inverse_rms(x, eps) if has_norm else _ONE
                _rotate_head(x, scale, q_weight, cos[row], sin[row], q[row, head])
            for head in range(num_kv_heads):
                x = qkv[row, num_heads + head]
                scale = _inverse_rms(x, eps) if has_norm else _ONE
                _rotate_head(x, scale, k_weight, cos[row], sin[row], kv[row, 0, head])
                value, target = qkv[row, num_heads + num_kv_heads + head], kv[row, 1, head]
                for i in range(head_dim):
                    target[i] = value[i]
        item = next_item(task)


def _gate(task: Any) -> None:
    """out = gate * sigmoid(s) * up, with s the gate itself (SiLU) or GELU's by tanh."""
    rows_per_item, num_rows, size = task[_ROWS_PER_ITEM], task[_NUM_ROWS], task[_SIZE]
    is_gelu = task[_IS_GELU]
    gate_up = carray(floats_at(task[_GATE_UP]), (num_rows, 2, size))
    out = carray(floats_at(task[_GATED]), (num_rows, size))
    item = next_item(task)
    while item < task[NUM_ITEMS]:
        for row in range(item * rows_per_item, min((item + 1) * rows_per_item, num_rows)):
            gate, up, target = gate_up[row, 0], gate_up[row, 1], out[row]
            if is_gelu:
                for i in range(size):
                    g = gate[i]
                    # 2 sqrt(2 / pi), as (1 + tanh(z)) / 2 = sigmoid(2 z)
                    s = np.float32(1.5957691) * (g + np.float32(0.044715) * (g * g * g))
                    target[i] = g * up[i] / (_ONE + exp(-s))
            else:
                for i in range(size):
                    g = gate[i]
                    target[i] = g * up[i] / (_ONE + exp(-g))
        item = next_item(task)


norm, add_norm, rotate, gate = Loop(_norm), Loop(_add_norm), Loop(_rotate), Loop(_gate)
