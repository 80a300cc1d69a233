"""A weight kept in the whole numbers that its checkpoint has of it, and float32 ones beside it."""

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from diptych.models.compact import HEAD_BYTES


class CompactWeight(NamedTuple):
    """See :mod:`diptych.models.compact`: it stands for float32 numbers, bit for bit."""

    memory: Tensor  # [num_rows, bytes of a row] uint8, contiguous
    block_size: int  # numbers under one scale

    @property
    def shape(self) -> tuple[int, int]:
        """[num_rows, num_columns] of the weight that it stands for."""
        num_rows, num_bytes = self.memory.shape
        return num_rows, num_bytes // (HEAD_BYTES + self.block_size) * self.block_size

    @property
    def device(self) -> torch.device:
        return self.memory.device

    def rows(self, begin: int, end: int) -> "CompactWeight":
        """A part of it, in the same memory."""
        return self._replace(memory=self.memory[begin:end])

    def fill(self, source: "CompactWeight") -> None:
        """Become the same weight; the source's blocks are of this size or a multiple of it."""
        num_parts = source.block_size // self.block_size
        if num_parts == 1:
            self.memory.copy_(source.memory)
            return
        blocks, here = source._blocks(), self._blocks()
        here = here.view(len(here), -1, num_parts, HEAD_BYTES + self.block_size)
        here[..., :HEAD_BYTES] = blocks[:, :, None, :HEAD_BYTES]
        numbers = blocks[:, :, HEAD_BYTES:]
        here[..., HEAD_BYTES:] = numbers.reshape(*numbers.shape[:2], num_parts, -1)

    def widened(self) -> Tensor:
        """The float32 weight. [num_rows, num_columns]"""
        blocks = self._blocks()
        heads = blocks[:, :, :HEAD_BYTES].contiguous().view(torch.float32)
        numbers = blocks[:, :, HEAD_BYTES:].view(torch.int8).float()
        return numbers.mul_(heads[:, :, :1]).add_(heads[:, :, 1:]).view(self.shape)

    def _blocks(self) -> Tensor:
        return self.memory.view(len(self.memory), -1, HEAD_BYTES + self.block_size)


class FoundCompact(NamedTuple):
    """That a checkpoint has a weight in compact form, or one that such a form stands for."""

    block_size: int
    fill: Callable[[CompactWeight], None]  # writes it, in blocks of this size or smaller ones
    # The bytes that the checkpoint should have of it; None: it is the checkpoint's own.
    pieces: Callable[[], Iterator[memoryview]] | None


Weight: TypeAlias = Tensor | CompactWeight


def widened(weight: Weight) -> Tensor:
    """The numbers that it stands for; the weight itself where it is those."""
    return weight if isinstance(weight, Tensor) else weight.widened()


def rows_of(weight: Weight, numbers: Tensor) -> Tensor:
    """Some rows, as new memory. numbers: [N] -> [N, num_columns]"""
    if isinstance(weight, Tensor):
        return F.embedding(numbers, weight)
    return weight._replace(memory=F.embedding(numbers, weight.memory)).widened()
