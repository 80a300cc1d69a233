"""Memory that one product of many rows needs while it runs, kept from one to the next."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from numba import njit
from torch import Tensor

from diptych.engine.backends.cpu.huge_pages import HugePages

S = TypeVar("S", bound="Scratch")


class Scratch:
    """Memory for one product at a time, of up to ``num_threads`` threads."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self.num_taken = torch.zeros(1, dtype=torch.int64)
        """A counter from which each thread of a call takes a number of its own."""
        self.x, self.panels = _empty(), _empty()
        """For x as the kernel reads it, and for the panels of all threads: bytes."""
        self._pages = HugePages()

    def make_room(self, x_bytes: int, thread_bytes: int) -> None:
        """See that ``x`` and ``panels`` are large enough: so many bytes, and so many a thread."""
        self.x = self._at_least(x_bytes, self.x)
        self.panels = self._at_least(self.num_threads * thread_bytes, self.panels)

    def num_groups(self, num_panels: int, most: int) -> int:
        """In how many groups of ``most`` panels or fewer threads take them.

        As many for each thread if possible.
        """
        rounds = -(-num_panels // (most * self.num_threads))
        return min(num_panels, rounds * self.num_threads)

    def _at_least(self, num_bytes: int, memory: Tensor) -> Tensor:
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


def _empty() -> Tensor:
    """No memory yet."""
    return torch.empty(0, dtype=torch.uint8)


@njit(error_model="numpy")
def group_of(num_panels: int, num_groups: int, group: int) -> tuple[int, int]:
    """First panel and end of one of the groups, the larger ones first.

    So threads that take them in turn, as many each, have panels alike but for one.
    """
    fewest, num_larger = num_panels // num_groups, num_panels % num_groups
    first = group * fewest + min(group, num_larger)
    end = first + fewest
    return first, end + 1 if group < num_larger else end
