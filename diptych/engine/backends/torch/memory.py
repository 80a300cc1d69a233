"""Memory of a device of torch's, as its caching allocator has it."""

from typing import Protocol


class Allocator(Protocol):
    """The functions of torch.cuda, or another device's module, that are used here."""

    def empty_cache(self) -> None: ...


class TorchDeviceMemory:
    """Implements ``DeviceMemory``."""

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator

    def release_unused(self) -> None:
        self._allocator.empty_cache()
