"""The ucxx agent without its library: which runs of blocks it asks for, and which it sends."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvtransfer.ucxx_agent import runs_of


def ids(*values: int) -> NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


@pytest.mark.parametrize(
    ("source", "local", "runs"),
    [
        (ids(7), ids(3), [[7, 3, 1]]),
        (ids(4, 5, 6), ids(0, 1, 2), [[4, 0, 3]]),
        (ids(6, 4, 5), ids(2, 0, 1), [[4, 0, 3]]),
        (ids(4, 5, 6), ids(0, 1, 9), [[4, 0, 2], [6, 9, 1]]),
        (ids(4, 5, 9), ids(0, 1, 2), [[4, 0, 2], [9, 2, 1]]),
        (ids(0, 1), ids(1, 0), [[0, 1, 1], [1, 0, 1]]),
    ],
)
def test_blocks_that_are_neighbours_on_both_sides_make_one_message(
    source: NDArray[np.int32], local: NDArray[np.int32], runs: list[list[int]]
) -> None:
    assert runs_of(source, local).tolist() == runs


@given(st.lists(st.integers(0, 40), unique=True, min_size=1))
def test_runs_are_the_blocks_each_once(source: list[int]) -> None:
    local = np.random.default_rng(len(source)).permutation(64)[: len(source)].astype(np.int32)
    pairs = [
        (first + index, into + index)
        for first, into, num in runs_of(ids(*source), local).tolist()
        for index in range(num)
    ]
    assert sorted(pairs) == sorted(zip(source, local.tolist(), strict=True))
