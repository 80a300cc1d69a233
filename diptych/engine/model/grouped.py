"""A weight kept as small numbers by groups, as kernels multiply it."""

import enum
from typing import NamedTuple

import torch
from torch import Tensor

SPAN = 32  # columns whose numbers of four bits lie in 16 bytes


class Numbers(enum.Enum):
    """What a group's scale is multiplied by."""

    INT4 = 4  # whole numbers, less the group's zero
    INT8 = 8
    FP8 = "e4m3"  # 8-bit floats; there are no zeros

    @property
    def bits(self) -> int:
        return 4 if self is Numbers.INT4 else 8


class GroupFormat(NamedTuple):
    """Of which kind a weight is."""

    num_rows: int
    num_columns: int  # a multiple of the span and of the group's size
    numbers: Numbers
    group_size: int  # columns, a multiple of the span


class GroupedWeight(NamedTuple):
    """It stands for ``scale * (number - zero)``, a scale and a zero for each group of columns.

    Where numbers are 8-bit floats, for ``scale * number``. Of whole numbers of four bits, a byte
    has one of a span's first 16 columns in its lower half, and of its last 16 in the upper one.
    """

    numbers: Tensor  # [num_rows, num_columns * bits / 8] uint8, contiguous
    zeros: Tensor | None  # [num_rows, num_groups] uint8
    scales: Tensor  # [num_rows, num_groups] float32
    order: Tensor | None  # [num_columns] int64, which input each column is for; None: its own
    kind: Numbers
    group_size: int

    @classmethod
    def empty(cls, kind: GroupFormat, device: torch.device) -> "GroupedWeight":
        """Memory to be filled; for inputs in their order."""
        groups = kind.num_rows, kind.num_columns // kind.group_size
        return cls(
            torch.empty(
                kind.num_rows,
                kind.num_columns * kind.numbers.bits // 8,
                dtype=torch.uint8,
                device=device,
            ),
            None
            if kind.numbers is Numbers.FP8
            else torch.empty(groups, dtype=torch.uint8, device=device),
            torch.empty(groups, device=device),
            None,
            kind.numbers,
            kind.group_size,
        )

    @property
    def shape(self) -> tuple[int, int]:
        """[num_rows, num_columns] of the weight that it stands for."""
        num_rows, num_bytes = self.numbers.shape
        return num_rows, num_bytes * 8 // self.kind.bits

    def rows(self, begin: int, end: int) -> "GroupedWeight":
        """A part of it, in the same memory."""
        return self._replace(
            numbers=self.numbers[begin:end],
            zeros=None if self.zeros is None else self.zeros[begin:end],
            scales=self.scales[begin:end],
        )

    def pack(self, numbers: Tensor) -> None:
        """Write the numbers. [num_rows, num_columns] uint8, or their bits; by columns' order."""
        if self.kind.bits == 8:
            self.numbers.copy_(numbers)
            return
        spans = numbers.view(len(numbers), -1, 2, SPAN // 2)
        self.numbers.copy_((spans[:, :, 0] | spans[:, :, 1] << 4).flatten(1))

    def widened(self) -> Tensor:
        """The float32 weight. [num_rows, num_columns], by inputs; of kernels the reference."""
        num_rows, num_columns = self.shape
        numbers = self.numbers
        if self.kind is Numbers.FP8:
            numbers = numbers.view(torch.float8_e4m3fn)
        if self.kind is Numbers.INT4:
            halves = self.numbers.view(num_rows, -1, 1, SPAN // 2)
            numbers = torch.cat((halves & 15, halves >> 4), 2).view(num_rows, num_columns)
        grouped = numbers.float().view(num_rows, -1, self.group_size)
        if self.zeros is not None:
            grouped = grouped - self.zeros[..., None]
        weight = (grouped * self.scales[..., None]).flatten(1)
        return weight if self.order is None else weight[:, self.order.argsort()]
