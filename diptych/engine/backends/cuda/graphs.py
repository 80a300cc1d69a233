"""What a device was asked for once, to be asked for again at one go."""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Replay(NamedTuple):
    """Launches that were captured."""

    run: Callable[[], object]  # asks for all of them again, with what the same memory holds then
    out: Tensor  # where their result is, until the next run of this one


class GraphDevice(Protocol):
    """Captures launches. Model thread, which the device is given nothing by but this."""

    def capture(self, launch: Callable[[], Tensor]) -> Replay:
        """``launch`` may be called several times; it reads and writes memory that stays, alone.

        The result's contents count from the first run on.
        """
        ...


class CudaGraphs:
    """Of one NVIDIA device; graphs that are there share their memory. Implements ``GraphDevice``.

    torch takes no pool again of which all graphs are gone: those after them have another.
    """

    def __init__(self) -> None:
        self._pool: Any = None  # a handle of torch's
        self._graphs = weakref.WeakSet[Any]()  # captured with it

    def capture(self, launch: Callable[[], Tensor]) -> Replay:
        launch()  # what is compiled or set up once, must not be within
        torch.cuda.synchronize()
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Of this thread's calls alone: others may allocate meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = launch()
        self._graphs.add(graph)
        return Replay(graph.replay, out)
