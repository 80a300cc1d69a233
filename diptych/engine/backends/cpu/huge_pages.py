"""Memory on huge pages, for what is read as a whole at every step.

With pages of 4 KiB the processor spends much of a decode step on finding them. Linux
gives pages of 2 MiB to those who ask; elsewhere this is ordinary memory.
"""

import contextlib
import mmap

import torch
from torch import Tensor

_PAGE_BYTES = 2 << 20
_CHUNK_BYTES = 64 << 20


class HugePages:
    """Places tensors one behind the other. A chunk is freed with its last tensor."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)  # what is left of the newest one

    def empty(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8, on a cache line; on no page yet before it is written."""
        if num_bytes > len(self._chunk):
            self._chunk = _allocate(max(num_bytes, _CHUNK_BYTES))
        space = self._chunk[:num_bytes]
        self._chunk = self._chunk[num_bytes + -num_bytes % 64 :]
        return space


def _allocate(num_bytes: int) -> Tensor:
    """At least ``num_bytes`` from a page's beginning; untouched memory is not occupied."""
    pages = mmap.mmap(-1, num_bytes + 2 * _PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # another system, or a kernel without
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    begin = -memory.data_ptr() % _PAGE_BYTES
    return memory[begin : len(memory) - _PAGE_BYTES]
