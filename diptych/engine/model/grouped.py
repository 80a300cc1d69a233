"""A weight kept as whole numbers by groups, as kernels multiply it."""

from typing import NamedTuple

import torch
from torch import Tensor

SPAN = 32  # columns whose numbers of four bits lie in 16 bytes


class GroupFormat(NamedTuple):
    """Of which kind a weight is."""

    num_rows: int
    num_columns: int  # a multiple of the span and of the group's size
    bits: int  # 4 or 8
    group_size: int  # columns, a multiple of the span


class GroupedWeight(NamedTuple):
    """It stands for ``scale * (number - zero)``, a scale and a zero for each group of columns.

    Of numbers of four bits, a byte has one of a span's first 16 columns in its lower half, and
    of its last 16 in the upper one.
    """

    numbers: Tensor  # [num_rows, num_columns * bits / 8] uint8, contiguous
    zeros: Tensor  # [num_rows, num_groups] uint8
    scales: Tensor  # [num_rows, num_groups] float32
    order: Tensor | None  # [num_columns] int64, which input each column is for; None: its own
    bits: int
    group_size: int

    @classmethod
    def empty(cls, kind: GroupFormat, device: torch.device) -> "GroupedWeight":
        """Memory to be filled; for inputs in their order."""
        groups = kind.num_rows, kind.num_columns // kind.group_size
        return cls(
            torch.empty(
                kind.num_rows, kind.num_columns * kind.bits // 8, dtype=torch.uint8, device=device
            ),
            torch.empty(groups, dtype=torch.uint8, device=device),
            torch.empty(groups, device=device),
            None,
            kind.bits,
            kind.group_size,
        )

    @property
    def shape(self) -> tuple[int, int]:
        """[num_rows, num_columns] of the weight that it stands for."""
        num_rows, num_bytes = self.numbers.shape
        return num_rows, num_bytes * 8 // self.bits

    def rows(self, begin: int, end: int) -> "GroupedWeight":
        """A part of it, in the same memory."""
        return self._replace(
            numbers=self.numbers[begin:end],
            zeros=self.zeros[begin:end],
            scales=self.scales[begin:end],
        )

    def pack(self, numbers: Tensor) -> None:
        """Write the numbers. [num_rows, num_columns] uint8, by its columns' order."""
        if self.bits == 8:
            self.numbers.copy_(numbers)
            return
        spans = numbers.view(len(numbers), -1, 2, SPAN // 2)
        self.numbers.copy_((spans[:, :, 0] | spans[:, :, 1] << 4).flatten(1))

    def widened(self) -> Tensor:
        """The float32 weight. [num_rows, num_columns], by inputs; of kernels the reference."""
        num_rows, num_columns = self.shape
        numbers = self.numbers
        if self.bits == 4:
            halves = self.numbers.view(num_rows, -1, 1, SPAN // 2)
            numbers = torch.cat((halves & 15, halves >> 4), 2).view(num_rows, num_columns)
        grouped = numbers.float().view(num_rows, -1, self.group_size)
        weight = ((grouped - self.zeros[..., None]) * self.scales[..., None]).flatten(1)
        return weight if self.order is None else weight[:, self.order.argsort()]
