"""Graphs without a device: what was captured is run again, and gives nothing before."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from diptych.engine.backends.cuda.graphs import Replay

_SEEN_BY_HOST = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select"}


class Unseen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what asks for a number of the device, as capturing does."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert func.name() not in _SEEN_BY_HOST, f"{func.name()} within a graph"
        return func(*args, **(kwargs or {}))


class RecordedGraphs:
    """Implements ``GraphDevice``; its launches must ask for nothing that a host would see."""

    def __init__(self) -> None:
        self.runs: list[int] = []  # rows of each that was run
        self.num_captured = 0

    def capture(self, launch: Callable[[], Tensor]) -> Replay:
        launch()  # what is compiled or set up once, must not be within
        with Unseen():  # type: ignore[no-untyped-call]
            out = torch.full_like(launch(), torch.nan)
        self.num_captured += 1

        def run() -> None:
            self.runs.append(len(out))
            with Unseen():  # type: ignore[no-untyped-call]
                out.copy_(launch())

        return Replay(run, out)
