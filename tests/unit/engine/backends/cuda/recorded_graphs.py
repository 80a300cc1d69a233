"""Graphs without a device: what was captured is run again, and gives nothing before."""

from collections.abc import Callable

import torch
from torch import Tensor

from diptych.engine.backends.cuda.graphs import Replay
from tests.seen_by_nobody import SeenByNobody


class RecordedGraphs:
    """Implements ``GraphDevice``; its launches must ask for nothing that a host would see."""

    def __init__(self) -> None:
        self.runs: list[int] = []  # rows of each that was run
        self.num_captured = 0

    def capture(self, launch: Callable[[], Tensor]) -> Replay:
        launch()  # what is compiled or set up once, must not be within
        with SeenByNobody():  # type: ignore[no-untyped-call]
            out = torch.full_like(launch(), torch.nan)
        self.num_captured += 1

        def run() -> None:
            self.runs.append(len(out))
            with SeenByNobody():  # type: ignore[no-untyped-call]
                out.copy_(launch())

        return Replay(run, out)
