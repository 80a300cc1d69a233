"""Copies between host and device that nobody waits for. Model thread."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Send = Callable[[NDArray[Any]], Tensor]
"""A copy where the model is computed. Nobody waits for it."""


def on_device(values: NDArray[np.int64] | NDArray[np.float64], device: torch.device) -> Tensor:
    """A copy that nobody waits for: the driver has its own before this returns."""
    return torch.from_numpy(values).to(device, non_blocking=True)


def on_host(x: Tensor) -> Tensor:
    """Filled when the device gets there."""
    if x.device.type == "cpu":
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
