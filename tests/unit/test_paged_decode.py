"""The compiled decode kernel against numpy in float64."""

import numpy as np
import pytest
from numpy.typing import NDArray

from diptych.engine.paged_decode import NO_WINDOW, attend

LAYERS, KV_HEADS, GROUP, BLOCK_SIZE, HEAD_DIM = 3, 2, 3, 8, 16
SCALE = 0.3


@pytest.fixture(params=[1, 2], ids=["serial", "parallel"])
def num_threads(request: pytest.FixtureRequest) -> int:
    threads: int = request.param
    return threads


def naive(
    q: NDArray[np.float32], keys: NDArray[np.float32], values: NDArray[np.float32]
) -> NDArray[np.float64]:
    """q: [heads, head_dim]; keys, values: [kv_heads, context, head_dim]."""
    out = np.empty(q.shape)
    for head in range(len(q)):
        scores = keys[head // GROUP].astype(np.float64) @ q[head] * SCALE
        weights = np.exp(scores - scores.max())
        out[head] = weights @ values[head // GROUP] / weights.sum()
    return out


@pytest.mark.parametrize("window", [NO_WINDOW, 5, 8, 40])
@pytest.mark.parametrize("spread", [0.1, 30.0])
def test_equals_numpy(window: int, spread: float, num_threads: int) -> None:
    rng = np.random.default_rng(1)
    lengths = np.array([1, 7, 8, 9, 64, 33], np.int64)
    num_blocks = 60
    shape = (num_blocks, LAYERS, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    cache = np.full(shape, np.nan, np.float32)
    tables = rng.permutation(num_blocks)[:48].reshape(6, 8).astype(np.int64)
    q = (rng.standard_normal((6, KV_HEADS * GROUP, HEAD_DIM)) * spread).astype(np.float32)
    expected = []
    for row, length in enumerate(lengths):
        kv = rng.standard_normal((2, KV_HEADS, length, HEAD_DIM)).astype(np.float32)
        for position in range(length):
            block = tables[row, position // BLOCK_SIZE]
            cache[block, 1, :, :, position % BLOCK_SIZE] = kv[:, :, position]
        begin = max(0, int(length) - window)
        expected.append(naive(q[row], kv[0, :, begin:], kv[1, :, begin:]))
    out = np.full_like(q, np.nan)
    attend(q, cache, 1, tables, lengths, window, SCALE, out, num_threads)
    np.testing.assert_allclose(out, np.stack(expected), atol=1e-5)
