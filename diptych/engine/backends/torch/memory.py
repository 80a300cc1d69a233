"""Memory of a device of torch's, as its caching allocator has it."""

from typing import Protocol

import torch

from diptych.engine.backends.base import MemoryUsage


class Allocator(Protocol):
    """The functions of torch.cuda, or another device's module, that are used here."""

    def empty_cache(self) -> None: ...
    def reset_peak_memory_stats(self, device: torch.device) -> None: ...
    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        """Free and total bytes."""
        ...

    def memory_reserved(self, device: torch.device) -> int: ...
    def max_memory_reserved(self, device: torch.device) -> int: ...


class TorchDeviceMemory:
    """Implements ``DeviceMemory``. What the driver and its libraries take is not counted."""

    def __init__(self, device: torch.device, allocator: Allocator) -> None:
        self._device, self._allocator = device, allocator

    def release_unused(self) -> None:
        self._allocator.empty_cache()
        self._allocator.reset_peak_memory_stats(self._device)

    def usage(self) -> MemoryUsage:
        free_bytes, total_bytes = self._allocator.mem_get_info(self._device)
        return MemoryUsage(
            total_bytes,
            free_bytes,
            self._allocator.memory_reserved(self._device),
            self._allocator.max_memory_reserved(self._device),
        )
