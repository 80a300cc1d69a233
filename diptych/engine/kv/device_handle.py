"""A device's memory in the hands of two processes of one machine: by CUDA, as torch has it."""

import pickle
from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor
from torch.multiprocessing import reductions

from diptych.engine.kv.memory import wait_for

_reduce: Callable[[Tensor], tuple[Any, ...]] = reductions.reduce_tensor


def handle_of(memory: Tensor) -> bytes:
    """For another process, which sees the same devices under the same numbers.

    ``memory`` has to live as long as that uses it. Raises RuntimeError: the driver gives none.
    """
    return pickle.dumps(_reduce(memory))


def opened(handle: bytes) -> Tensor:
    """The memory of ``handle``, in place. Raises RuntimeError: it cannot be had here."""
    rebuild: Callable[..., Tensor]
    arguments: tuple[Any, ...]
    rebuild, arguments = pickle.loads(handle)
    return rebuild(*arguments)


class OpenedKVMemory:
    """Memory of another process's pool, on this rank's device; zeroed by whoever took it."""

    kind: Literal["VRAM"] = "VRAM"
    shared_fd = None

    def __init__(self, handle: bytes) -> None:
        """Raises RuntimeError."""
        self.bytes = opened(handle)
        self.device_id = self.bytes.device.index or 0

    def synchronise(self) -> None:
        wait_for(self.bytes.device)
