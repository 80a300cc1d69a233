"""What steps are sent, through host memory that stays and that the device reads by itself.

Each step in flight has one buffer on the host and one of that size on the device, which are filled
from the front. A buffer is filled anew when the device has done all of the step before that had it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych.engine.backends.base import Mark

_ALIGNMENT: Final = 256  # bytes: kernels are compiled for what the addresses are multiples of
_FIRST_BYTES: Final = 1 << 16


class CopyMemory(Protocol):
    """Where the buffers are. Each is [num_bytes] uint8."""

    def on_host(self, num_bytes: int) -> Tensor:
        """Of which copies to the device are not waited for."""
        ...

    def on_device(self, num_bytes: int) -> Tensor: ...

    def mark(self) -> Mark:
        """The moment now, on the device."""
        ...


@dataclass
class _Buffer:
    host: Tensor
    device: Tensor
    num_used: int = 0  # bytes
    last_use: Mark | None = None


class PinnedCopies:
    """For one step after another. Model thread."""

    def __init__(self, memory: CopyMemory, num_steps: int) -> None:
        """num_steps: that may be in flight. Takes memory with the first step."""
        self._memory, self._num_steps = memory, num_steps
        self._buffers: list[_Buffer] = []  # that of the step at hand is the last

    def begin_step(self) -> None:
        """What is sent from here on is another step's. Raises DeviceLostError."""
        buffers = self._buffers
        if buffers:
            buffers[-1].last_use = self._memory.mark()
        if len(buffers) < self._num_steps:
            buffers.append(self._allocate(_FIRST_BYTES))
            return
        buffer = buffers.pop(0)
        buffers.append(buffer)
        if buffer.last_use is not None:
            buffer.last_use.wait()
        buffer.num_used = 0

    def send(self, values: NDArray[Any]) -> Tensor:
        """A copy on the device, that counts until as many steps have begun as may be in flight."""
        buffer = self._buffers[-1]
        begin = -(-buffer.num_used // _ALIGNMENT) * _ALIGNMENT
        end = begin + values.nbytes
        if end > len(buffer.host):  # what is there already stays with those who use it
            buffer = self._buffers[-1] = self._allocate(2 * end)
            begin, end = 0, values.nbytes
        buffer.num_used = end
        host = buffer.host[begin:end]
        host.numpy().view(values.dtype).reshape(values.shape)[...] = values
        device = buffer.device[begin:end].copy_(host, non_blocking=True)
        return device.view(torch.from_numpy(values[:0]).dtype).view(values.shape)

    def _allocate(self, num_bytes: int) -> _Buffer:
        return _Buffer(self._memory.on_host(num_bytes), self._memory.on_device(num_bytes))


class TorchCopyMemory:
    """Of an NVIDIA device. Implements ``CopyMemory``."""

    def __init__(self, device: torch.device, mark: Callable[[], Mark]) -> None:
        self._device, self._mark = device, mark

    def on_host(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def on_device(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def mark(self) -> Mark:
        return self._mark()
