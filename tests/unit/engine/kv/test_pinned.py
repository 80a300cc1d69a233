"""Host memory that a device copies from and to by itself, over a stand-in for CUDA's runtime."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from diptych.engine.kv.memory import DeviceKVMemory


class Runtime:
    """torch.cuda.cudart()."""

    def __init__(self, status: int = 0) -> None:
        self._status = status
        self.registered: dict[int, int] = {}  # bytes, by address

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.registered[address] = num_bytes
        return self._status

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


def device(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> DeviceKVMemory:
    memory = DeviceKVMemory(8, torch.device("cpu"))
    monkeypatch.setattr(memory, "_copies", SimpleNamespace(device="cuda:0"))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    return memory


def test_what_is_pinned_is_unpinned(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, buffer = Runtime(), memoryview(bytearray(4096))
    unpin = device(runtime, monkeypatch).pin(buffer)
    address = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
    assert runtime.registered == {address: 4096}
    unpin()
    assert not runtime.registered


def test_what_cannot_be_pinned_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = device(Runtime(status=2), monkeypatch)
    with pytest.raises(RuntimeError, match="cudaHostRegister of 4096 bytes: error 2"):
        memory.pin(memoryview(bytearray(4096)))


def test_without_a_device_nothing_is_pinned() -> None:
    DeviceKVMemory(8, torch.device("cpu")).pin(memoryview(bytearray(8)))()
