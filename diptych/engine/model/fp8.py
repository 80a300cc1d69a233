"""Weights stored as 8-bit floats with scales: what they stand for."""

from typing import NamedTuple

import torch
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 20  # widened at a time, so that little lies beside the result


class Fp8Weight(NamedTuple):
    """A weight kept in 8-bit floats, with scales for each row."""

    numbers: Tensor  # [num_rows, num_columns] e4m3, contiguous
    scales: Tensor  # [num_rows, num_groups] float32, of equal parts of a row

    def is_finite(self) -> bool:
        """Whether no number is none."""
        return not bool(((self.numbers.view(torch.uint8) & 127) == 127).any())

    def rows(self, begin: int, end: int) -> "Fp8Weight":
        """A part of it, in the same memory."""
        return Fp8Weight(self.numbers[begin:end], self.scales[begin:end])


def widen(stored: Tensor, scale: Tensor, block: tuple[int, int] | None, out: Tensor) -> None:
    """out = stored * scale, in float32 and then rounded. stored, out: [num_rows, num_columns].

    scale: one, one for each row, or one for each block of so many rows and columns, the last
    ones of which may reach over the end.

    Raises:
        ValueError: a scale of another shape.
    """
    num_rows, num_columns = stored.shape
    width = block[1] if block else num_columns
    scales = scales_of_rows(scale.to(out.device, torch.float32), num_rows, num_columns, block)
    step = max(1, _CHUNK_ELEMENTS // num_columns)
    for begin in range(0, num_rows, step):
        part = scales[begin : begin + step]  # [rows, number of blocks beside each other]
        if part.shape[1] > 1:
            part = part.repeat_interleave(width, 1)[:, :num_columns]
        out[begin : begin + step] = stored[begin : begin + step].to(out.device).float().mul_(part)


def scales_of_rows(
    scale: Tensor, num_rows: int, num_columns: int, block: tuple[int, int] | None
) -> Tensor:
    """Those of each row: [num_rows, 1], or [num_rows, number of blocks beside each other].

    Raises:
        ValueError: a scale of another shape.
    """
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(num_rows, 1)
    if scale.shape in ((num_rows,), (num_rows, 1)):
        return scale.reshape(num_rows, 1)
    if block and scale.shape == (-(-num_rows // block[0]), -(-num_columns // block[1])):
        return scale.repeat_interleave(block[0], 0)[:num_rows]
    raise ValueError(f"a scale of {list(scale.shape)} fits no weight of {[num_rows, num_columns]}")
