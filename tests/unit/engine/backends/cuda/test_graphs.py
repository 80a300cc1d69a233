"""Graphs share a pool while one of them is there; torch takes none again that all have left."""

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from diptych.engine.backends.cuda.graphs import CudaGraphs


class Pools:
    """How torch's allocator counts the graphs of each pool."""

    def __init__(self) -> None:
        self.num_graphs = Counter[int]()

    def begin(self, pool: int) -> None:
        assert pool not in self.num_graphs or self.num_graphs[pool], "all of its graphs are gone"
        self.num_graphs[pool] += 1


class Graph:
    """What torch captures into."""

    def __init__(self, pools: Pools) -> None:
        self.pools, self.pool = pools, 0

    def replay(self) -> None: ...

    def __del__(self) -> None:
        self.pools.num_graphs[self.pool] -= 1


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Pools:
    pools, handles = Pools(), itertools.count(1)

    @contextmanager
    def capturing(graph: Graph, pool: int, capture_error_mode: str) -> Iterator[None]:
        pools.begin(pool)
        graph.pool = pool
        yield

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(pools))
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    return pools


def launched() -> Tensor:
    return torch.zeros(1)


def test_graphs_that_are_there_share_their_memory(pools: Pools) -> None:
    graphs = CudaGraphs()
    first, second = graphs.capture(launched), graphs.capture(launched)
    del first
    third = graphs.capture(launched)
    assert pools.num_graphs == {1: 2}
    del second, third


def test_those_that_come_when_all_are_gone_have_a_pool_of_their_own(pools: Pools) -> None:
    """A worker captures graphs to see what they take, and again once it has its KV pool."""
    graphs = CudaGraphs()
    replays = [graphs.capture(launched) for _ in range(3)]
    del replays
    again = graphs.capture(launched)
    assert pools.num_graphs == {1: 0, 2: 1}
    again.run()
