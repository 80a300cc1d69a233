"""Memory that one product of many rows needs while it runs, kept from one to the next."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from diptych.engine.backends.cpu.huge_pages import HugePages

S = TypeVar("S", bound="Scratch")


class Scratch:
    """Memory for one product at a time, of up to ``num_threads`` threads."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self.num_taken = torch.zeros(1, dtype=torch.int64)
        """A counter from which each thread of a call takes a number of its own."""
        self._pages = HugePages()

    def at_least(self, num_bytes: int, memory: Tensor) -> Tensor:
        """``memory`` if it is large enough, else new."""
        return memory if len(memory) >= num_bytes else self._pages.empty(num_bytes)


class OfThread(threading.local, Generic[S]):
    """The scratches of the calling thread, one for each number of threads that products have."""

    def __init__(self, make: Callable[[int], S]) -> None:
        self._make = make
        self._made: dict[int, S] = {}

    def __call__(self, num_threads: int) -> S:
        if num_threads not in self._made:
            self._made[num_threads] = self._make(num_threads)
        return self._made[num_threads]


def empty() -> Tensor:
    """No memory yet."""
    return torch.empty(0, dtype=torch.uint8)
