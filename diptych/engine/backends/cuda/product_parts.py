"""Products of few rows with large weights: how their inputs are cut, so that all processors read.

A part is a sum of its own, in float32; they are added in their order. How many there are depends
on the weight and the device alone, so that a row's result does not depend on how many rows there
are.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from diptych.engine.backends.cuda.kernels import parts

_MIN_TILES = 4  # of a part: fewer are over before the next ones come
_SPAN = 512  # outputs of a row that one program adds


class Parts(NamedTuple):
    """Of the inputs of a product."""

    num_parts: int
    size: int  # inputs; the last one may have fewer, or none

    @classmethod
    def of(cls, num_inputs: int, tile_inputs: int, num_programs: int, max_programs: int) -> "Parts":
        """A power of two of parts. num_programs: of one; max_programs: of all."""
        num_tiles, count = triton.cdiv(num_inputs, tile_inputs), 1
        while 2 * count * num_programs <= max_programs and 2 * count * _MIN_TILES <= num_tiles:
            count *= 2
        return cls(count, triton.cdiv(num_tiles, count) * tile_inputs)


def memory(count: int, y: Tensor) -> Tensor:
    """What parts go into: the result itself for one, else new. [count, num_rows, num_outputs]."""
    return y if count == 1 else y.new_empty(count, *y.shape, dtype=torch.float32)


def add(sums: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """y = all parts, and the bias."""
    count, num_rows, num_outputs = sums.shape
    parts.add_parts[(triton.cdiv(num_outputs, _SPAN), num_rows)](
        sums, bias, y, num_rows, num_outputs, num_parts=count, width=_SPAN, num_warps=4
    )
