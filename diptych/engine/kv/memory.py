"""The bytes behind a KV cache, of the host or of a device."""

import mmap
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from diptych.engine.kv.shared_bytes import SharedBytes
from diptych.errors import DeviceLostError
from diptych.word_sums import Sums, Words


class KVMemory(Protocol):
    """One contiguous run of bytes; lives as long as whoever holds it."""

    @property
    def bytes(self) -> Tensor:
        """[num_bytes] uint8, on its device."""
        ...

    @property
    def kind(self) -> Literal["DRAM", "VRAM"]: ...

    @property
    def device_id(self) -> int:
        """Which device of its kind; 0 for the host."""
        ...

    @property
    def shared_fd(self) -> int | None:
        """A file that is this memory, for a child process to map; None where there is none."""
        ...

    def synchronise(self) -> None:
        """Return when all that was asked of this memory so far is done. Any thread.

        Raises DeviceLostError: it cannot be used again.
        """
        ...


@runtime_checkable
class SummingMemory(Protocol):
    """A device's memory of which no byte has to be copied out for a digest."""

    def word_sums(self, words: Words) -> list[Sums]:
        """Of each run, of what was there when it was called. Words must lie in it. Any thread.

        Nothing else that the device is at is waited for: what is to be summed has to be there.

        Raises RuntimeError: of the device, which may be lost.
        """
        ...


class HostKVMemory:
    """Host memory that a child process can map."""

    kind: Literal["DRAM"] = "DRAM"
    device_id = 0

    def __init__(self, num_bytes: int) -> None:
        """Zeroed and touched. Raises OSError, ValueError or OverflowError: it does not fit."""
        self._shared = SharedBytes(num_bytes)
        self.bytes = torch.frombuffer(self._shared.buffer, dtype=torch.uint8).zero_()

    @property
    def shared_fd(self) -> int | None:
        return self._shared.fd

    def synchronise(self) -> None:
        """Everything is done when it returns."""


class MappedKVMemory:
    """The host memory of another process, as a child that was given its file sees it."""

    kind: Literal["DRAM"] = "DRAM"
    device_id = 0

    def __init__(self, fd: int, num_bytes: int) -> None:
        """Raises OSError, ValueError: it cannot be mapped."""
        self.shared_fd: int | None = fd
        self.bytes = torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8)

    def synchronise(self) -> None:
        """Everything is done when it returns."""


class DeviceKVMemory:
    """Memory of a device of torch's."""

    kind: Literal["VRAM"] = "VRAM"
    shared_fd = None

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Zeroed. Raises RuntimeError: it does not fit."""
        self.bytes = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.device_id = self.bytes.device.index or 0

    def synchronise(self) -> None:
        wait_for(self.bytes.device)


def wait_for(device: torch.device) -> None:
    """Return when a device of torch's has done all that it was given. Any thread.

    Raises DeviceLostError: its driver reports an error of what ran; it does nothing more then.
    """
    try:
        torch.accelerator.synchronize(device)
    except RuntimeError as error:
        raise DeviceLostError(f"the device {device} is lost: {error}") from error
