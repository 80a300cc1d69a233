"""The bytes behind a KV cache, of the host or of a device."""

import contextlib
import mmap
import os
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Protocol

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
    """The host memory of another process, by its file, which this has from now on."""

    kind: Literal["DRAM"] = "DRAM"
    device_id = 0

    def __init__(self, fd: int, num_bytes: int) -> None:
        """Raises OSError, ValueError: it cannot be mapped."""
        self.shared_fd: int | None = fd
        self.bytes = torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8)

    def __del__(self) -> None:
        fd, self.shared_fd = self.shared_fd, None
        if fd is not None:
            os.close(fd)

    def synchronise(self) -> None:
        """Everything is done when it returns."""


class DeviceKVMemory:
    """Memory of a device of torch's. What sums it up where it lies is the device's backend's."""

    kind: Literal["VRAM"] = "VRAM"
    shared_fd = None

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Zeroed. Raises RuntimeError: it does not fit."""
        self.bytes = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        device = self.bytes.device
        self.device_id = device.index or 0
        self._copies = None
        if device.type == "cuda":
            self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def synchronise(self) -> None:
        wait_for(self.bytes.device)

    def word_sums(self, words: Words) -> list[Sums]:
        """Of each run, of what was there when it was called. Words must lie in it. Any thread.

        Nothing else that the device is at is waited for: what is to be summed has to be there.

        Raises RuntimeError: of the device, which may be lost.
        """
        raise NotImplementedError

    def pin(self, buffer: memoryview) -> Callable[[], None]:
        """Let the device copy from and to this host memory by itself; what is returned ends that.

        It has to end before the memory is unmapped: the driver hands out the same addresses again,
        and then refuses to allocate ("resource already mapped"). Raises RuntimeError: it cannot.
        """
        if self._copies is None:
            return lambda: None
        address = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._copies.device):
            status = int(runtime.cudaHostRegister(address, len(buffer), 0))
        if status:
            raise RuntimeError(f"cudaHostRegister of {len(buffer)} bytes: error {status}")
        return partial(_unpin, runtime, self._copies.device, address)

    def beside(self, copies: Callable[[], None]) -> Callable[[], bool]:
        """Have copies done on a stream of their own, beside the model's; whether they are.

        They must not wait. Any thread, one at a time. Raises RuntimeError, and so does what
        is returned: of the device.
        """
        if self._copies is None:
            copies()
            self.synchronise()
            return lambda: True
        over = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._copies.device), torch.cuda.stream(self._copies):
            copies()
            over.record(self._copies)
        return over.query


def _unpin(runtime: Any, device: torch.device, address: int) -> None:
    """Any thread. Of a lost device it fails: its process ends."""
    with contextlib.suppress(RuntimeError), torch.cuda.device(device):
        runtime.cudaHostUnregister(address)


def wait_for(device: torch.device) -> None:
    """Return when a device of torch's has done all that it was given. Any thread.

    Raises DeviceLostError: its driver reports an error of what ran; it does nothing more then.
    """
    try:
        torch.accelerator.synchronize(device)
    except RuntimeError as error:
        raise DeviceLostError(f"the device {device} is lost: {error}") from error
