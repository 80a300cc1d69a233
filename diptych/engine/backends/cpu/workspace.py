"""Memory that the operations of a step or a program share, one after another."""

import torch
from torch import Tensor

from diptych.engine.backends.cpu.huge_pages import HugePages


class Workspace:
    """Buffers by name, for up to ``max_rows`` rows. One address each, for as long as it lives."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._buffers: dict[tuple[str, int, torch.dtype], Tensor] = {}

    def take(
        self, name: str, num_rows: int, size: int, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """[num_rows, size], contiguous; the same memory for every number of rows."""
        key = (name, size, dtype)
        if key not in self._buffers:
            self._buffers[key] = torch.empty(self._max_rows, size, dtype=dtype)
        return self._buffers[key][:num_rows]


class StepMemory:
    """Buffers by name for one step after another, as large as the largest needed, on huge pages.

    New memory for each step would be of small pages, and every one of them a fault.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype, self._pages = dtype, HugePages()
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, num_rows: int, size: int) -> Tensor:
        """[num_rows, size], contiguous, of any content; until it is taken again."""
        num_bytes = num_rows * size * self._dtype.itemsize
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < num_bytes:
            buffer = self._buffers[name] = self._pages.empty(num_bytes)
        return buffer[:num_bytes].view(self._dtype).view(num_rows, size)
