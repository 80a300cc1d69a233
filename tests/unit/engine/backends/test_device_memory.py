"""A device's memory, as torch's allocator tells of it."""

import torch

from diptych.engine.backends.base import MemoryUsage
from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.backends.torch.memory import TorchDeviceMemory
from tests.engines import CPU

DEVICE = torch.device("cuda", 3)


class FakeAllocator:
    """Of one device: 100 bytes, 30 of them another process's."""

    def __init__(self) -> None:
        self.held, self.unused, self.peak = 20, 15, 45

    def empty_cache(self) -> None:
        self.held, self.unused = self.held - self.unused, 0

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        assert device == DEVICE
        self.peak = self.held

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        assert device == DEVICE
        return 70 - self.held, 100

    def memory_reserved(self, device: torch.device) -> int:
        assert device == DEVICE
        return self.held

    def max_memory_reserved(self, device: torch.device) -> int:
        assert device == DEVICE
        return self.peak


def test_what_is_unused_is_given_back_and_peaks_count_from_then() -> None:
    memory = TorchDeviceMemory(DEVICE, FakeAllocator())
    assert memory.usage() == MemoryUsage(100, 50, held_bytes=20, peak_bytes=45)
    memory.release_unused()
    assert memory.usage() == MemoryUsage(100, 65, held_bytes=5, peak_bytes=5)


def test_torchs_own_module_is_such_an_allocator() -> None:
    for name in vars(FakeAllocator):
        assert name.startswith("_") or callable(getattr(torch.cuda, name))


def test_the_hosts_memory_is_not_shared_out() -> None:
    assert CPU.memory is None
    assert TorchBackend(torch.device("cpu")).memory is None
