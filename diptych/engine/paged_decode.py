"""Decode attention that reads the KV blocks where they lie, compiled by numba.

Gathering a batch's context costs several times what the arithmetic does; this
kernel streams each block once. Work is cut by (row, key-value head). float32 on
the host only. The first call compiles (seconds; later processes find it in numba's
cache), so warm up first.

Only thread pools that survive calls from two threads at once are used (numba's own
aborts the process); without one, a single thread does the work.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

_Floats = NDArray[np.float32]
_Ints = NDArray[np.int64]
_Function = TypeVar("_Function", bound=Callable[..., Any])

NO_WINDOW = 1 << 62

numba.config.THREADING_LAYER = "threadsafe"  # type: ignore[attr-defined]


def _compiled(
    *, parallel: bool = False, reassociate: bool = True
) -> Callable[[_Function], _Function]:
    def decorate(function: _Function) -> _Function:
        options: dict[str, Any] = {"nogil": True, "parallel": parallel, "error_model": "numpy"}
        # Sums may be reordered; infinities and NaNs keep their meaning.
        options["fastmath"] = {"reassoc", "contract", "nsz"} if reassociate else {"contract"}
        try:
            compiled: _Function = numba.njit(cache=True, **options)(function)
        except RuntimeError:  # no directory to cache in
            compiled = numba.njit(**options)(function)
        return compiled

    return decorate


def attend(
    q: _Floats,
    cache: _Floats,
    layer: int,
    block_tables: _Ints,
    context_lens: _Ints,
    window: int,
    scale: float,
    out: _Floats,
    num_threads: int,
) -> None:
    """Attend from one token per row to the last ``window`` tokens of its context.

    q, out: [num_rows, num_heads, head_dim]; cache: [num_blocks, num_layers, 2,
    num_kv_heads, block_size, head_dim]; block_tables: [num_rows, columns];
    context_lens: [num_rows], the token itself included. All C-contiguous.
    """
    work = (q, cache, layer, block_tables, context_lens, window, np.float32(scale), out)
    if num_threads > 1 and _take_threads(num_threads):
        _attend_parallel(*work)
    else:
        _attend_serial(*work)


def _take_threads(num_threads: int) -> bool:
    """Whether numba may use more than one thread from now on."""
    limit: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    try:
        numba.set_num_threads(min(num_threads, limit))
    except ValueError:  # neither OpenMP nor TBB on this machine
        return False
    return limit > 1


@_compiled(reassociate=False)
def _exp_in_place(x: _Floats) -> None:
    """Natural exponent of values <= 0, error below 1e-6. Plain arithmetic, so it vectorises."""
    bits = np.empty(len(x), np.int32)
    powers = bits.view(np.float32)
    for i in range(len(x)):
        t = max(x[i], np.float32(-87.0)) * np.float32(1.44269504)
        whole = np.int32(t) - np.int32(1)  # so that 0 <= f <= 1; floor() would not vectorise
        f = t - np.float32(whole)
        bits[i] = (whole + np.int32(127)) << np.int32(23)
        # 2**f on [0, 1]: least largest relative error (2e-9) at degree 6, exact at 0.
        p = np.float32(2.1612924e-4)
        p = p * f + np.float32(1.2467844e-3)
        p = p * f + np.float32(9.6754518e-3)
        p = p * f + np.float32(5.5485281e-2)
        p = p * f + np.float32(2.4022931e-1)
        p = p * f + np.float32(6.9314704e-1)
        x[i] = p * f + np.float32(1.0)
    for i in range(len(x)):
        x[i] *= powers[i]


@_compiled()
def _attend_one(
    q: _Floats,
    cache: _Floats,
    layer: int,
    block_tables: _Ints,
    context_lens: _Ints,
    window: int,
    scale: np.float32,
    out: _Floats,
    row: int,
    head: int,
) -> None:
    """One row and key-value head, for all query heads of its group."""
    head_dim, block_size = cache.shape[5], cache.shape[4]
    group = q.shape[1] // cache.shape[3]
    end = context_lens[row]
    begin = max(0, end - window)
    scores = np.empty((group, end - begin), np.float32)
    position = begin
    while position < end:
        first = position % block_size
        count = min(block_size - first, end - position)
        keys = cache[block_tables[row, position // block_size], layer, 0, head]
        for g in range(group):
            query = q[row, head * group + g]
            for i in range(count):
                total = np.float32(0.0)
                for d in range(head_dim):
                    total += query[d] * keys[first + i, d]
                scores[g, position - begin + i] = total * scale
        position += count

    for g in range(group):
        out[row, head * group + g] = np.float32(0.0)
        scores[g] -= scores[g].max()
        _exp_in_place(scores[g])
        scores[g] /= scores[g].sum()

    position = begin
    while position < end:
        first = position % block_size
        count = min(block_size - first, end - position)
        values = cache[block_tables[row, position // block_size], layer, 1, head]
        for g in range(group):
            weights = scores[g, position - begin : position - begin + count]
            target = out[row, head * group + g]
            i = 0
            while i + 4 <= count:  # four at a time: fewer passes over the target
                for d in range(head_dim):
                    target[d] += (
                        weights[i] * values[first + i, d]
                        + weights[i + 1] * values[first + i + 1, d]
                        + weights[i + 2] * values[first + i + 2, d]
                        + weights[i + 3] * values[first + i + 3, d]
                    )
                i += 4
            while i < count:
                for d in range(head_dim):
                    target[d] += weights[i] * values[first + i, d]
                i += 1
        position += count


# Two functions rather than one made twice: numba's cache confuses twins.
@_compiled()
def _attend_serial(
    q: _Floats,
    cache: _Floats,
    layer: int,
    block_tables: _Ints,
    context_lens: _Ints,
    window: int,
    scale: np.float32,
    out: _Floats,
) -> None:
    for row in range(q.shape[0]):
        for head in range(cache.shape[3]):
            _attend_one(q, cache, layer, block_tables, context_lens, window, scale, out, row, head)


@_compiled(parallel=True)
def _attend_parallel(
    q: _Floats,
    cache: _Floats,
    layer: int,
    block_tables: _Ints,
    context_lens: _Ints,
    window: int,
    scale: np.float32,
    out: _Floats,
) -> None:
    num_kv_heads = cache.shape[3]
    for item in numba.prange(q.shape[0] * num_kv_heads):
        row, head = item // num_kv_heads, item % num_kv_heads
        _attend_one(q, cache, layer, block_tables, context_lens, window, scale, out, row, head)
