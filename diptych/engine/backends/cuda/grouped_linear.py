"""Linear layers of small numbers by groups, multiplied as they lie."""

import math
from typing import NamedTuple

import triton
from torch import Tensor

from diptych.engine.backends.cuda.kernels import grouped
from diptych.engine.model.grouped import SPAN, GroupedWeight, GroupFormat


class _Tiling(NamedTuple):
    """Sizes of what a program multiplies at a time, and what they are done by."""

    rows: int
    outputs: int
    inputs: int  # or as many as a group allows
    num_warps: int


_FEW = _Tiling(16, 32, 128, 4)  # tl.dot multiplies no fewer rows
_MANY = _Tiling(64, 128, 64, 8)


def takes(kind: GroupFormat) -> bool:
    """Whether there is a kernel for such a weight."""
    return kind.group_size % SPAN == 0 and kind.num_columns % kind.group_size == 0


class GroupedLinear:
    """Implements ``Linear``. A row's result has the same bits in any batch of few, or of many."""

    def __init__(self, weight: GroupedWeight, bias: Tensor | None = None) -> None:
        """weight: one that is taken."""
        self.weight, self._bias = weight, bias
        self.out_features, self.in_features = weight.shape

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        weight = self.weight
        num_rows = len(x)
        y = x.new_empty(num_rows, self.out_features) if out is None else out
        if not num_rows:
            return y
        tiling = _FEW if num_rows <= _FEW.rows else _MANY
        tiles = triton.cdiv(self.out_features, tiling.outputs), triton.cdiv(num_rows, tiling.rows)
        grouped.multiply[tiles](
            x.contiguous() if weight.order is None else x.index_select(1, weight.order),
            weight.numbers,
            weight.zeros,
            weight.scales,
            self._bias,
            y,
            num_rows,
            self.out_features,
            self.in_features,
            weight.group_size,
            bits=weight.kind.bits,
            tile_rows=tiling.rows,
            tile_outputs=tiling.outputs,
            tile_inputs=math.gcd(weight.group_size, tiling.inputs),
            num_warps=tiling.num_warps,
            num_stages=3,
        )
        return y
