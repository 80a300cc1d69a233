"""Memory that the operations of a program share, one after another."""

import torch
from torch import Tensor


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
