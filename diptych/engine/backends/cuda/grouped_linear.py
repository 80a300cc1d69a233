"""Linear layers of small numbers by groups, multiplied as they lie, or widened for many rows."""

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from diptych.engine.backends.cuda import product_parts
from diptych.engine.backends.cuda.kernels import grouped
from diptych.engine.backends.cuda.product_parts import Parts
from diptych.engine.backends.cuda.row_sums import sum_row
from diptych.engine.model.grouped import SPAN, GroupedWeight, GroupFormat, Numbers


class _Tiling(NamedTuple):
    """What a program of a product of some rows does."""

    max_rows: int  # that it is for
    rows: int  # 16 or 32 that go with what is unpacked; tl.dot multiplies no fewer
    has_others: bool  # as many again
    outputs: int
    inputs: int  # or as many as a group allows
    num_tiles: int  # of inputs, that are fetched ahead
    num_warps: int
    num_programs: float  # of a processor, up to which inputs are cut into parts


# One row is summed without a matrix unit; for more rows than these a weight is widened.
_TILINGS = (
    _Tiling(16, 16, False, 128, 128, 4, 4, 3.5),
    _Tiling(64, 32, True, 128, 64, 5, 4, 1.5),
)
_NUM_REGISTERS = 255  # all: unbidden the compiler saves some by a stack, for more programs
_SUM_TILE = 128  # inputs of one scale, or as many as a group allows
_SUM_OUTPUTS, _SUM_INPUTS = 8, 1024  # of one row, at a time
_WIDENED_ROWS, _WIDENED_BYTES = 4, 1024  # at a time
_MAX_PROGRAMS = 65_535  # of a grid, beside each other
_MAX_WIDENED_BYTES = 128 << 20  # that lie beside a weight; of a larger one it is a part each


def takes(kind: GroupFormat) -> bool:
    """Whether there is a kernel for such a weight."""
    return kind.group_size % SPAN == 0 and kind.num_columns % kind.group_size == 0


class GroupedLinear:
    """Implements ``Linear``.

    A row's result has the same bits in any batch of 2 to 16, and in any of 17 to 64. Alone it is
    summed in another order, and in larger batches its weights are rounded to the inputs' type.
    """

    def __init__(
        self, weight: GroupedWeight, bias: Tensor | None = None, *, num_processors: int
    ) -> None:
        """weight: one that is taken; its numbers and order are kept, of the rest a copy."""
        self._numbers, self._order, self._kind = weight.numbers, weight.order, weight.kind
        self._group_size, self._bias = weight.group_size, bias
        self.out_features, self.in_features = weight.shape
        self._scales = weight.scales.t().contiguous()  # [num_groups, out_features]
        self._offsets: Tensor | None = None
        middle = 1 << (weight.kind.bits - 1)
        if weight.zeros is not None and not bool((weight.zeros == middle).all()):
            self._offsets = (weight.zeros.t().contiguous().float() - middle) * self._scales
        self._parts = {tiling: self._cut(tiling, num_processors) for tiling in _TILINGS}

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        num_rows = len(x)
        y = x.new_empty(num_rows, self.out_features) if out is None else out
        if not num_rows:
            return y
        x = x.contiguous() if self._order is None else x.index_select(1, self._order)
        # A device multiplies float32, of tests alone, too slowly for these products.
        is_multiplied = x.dtype is not torch.float32 or x.device.type != "cuda"
        tiling = next((each for each in _TILINGS if num_rows <= each.max_rows), None)
        if num_rows == 1:
            self._sum(x, y)
        elif tiling is not None and is_multiplied:
            self._multiply(x, y, tiling)
        else:
            self._multiply_widened(x, y)
        return y

    def _cut(self, tiling: _Tiling, num_processors: int) -> Parts:
        num_programs = triton.cdiv(self.out_features, tiling.outputs)
        max_programs = int(num_processors * tiling.num_programs)
        return Parts.of(self.in_features, self._tile(tiling.inputs), num_programs, max_programs)

    def _sum(self, x: Tensor, y: Tensor) -> None:
        if self._is_single and self._kind is Numbers.INT8:
            sum_row(x, None, self._numbers, self._offsets, self._scales, self._bias, y)
            return
        grouped.sum_groups[(triton.cdiv(self.out_features, _SUM_OUTPUTS),)](
            x,
            self._numbers,
            self._offsets,
            self._scales,
            self._bias,
            y,
            self.out_features,
            self.in_features,
            group_size=self._group_size,
            bits=self._kind.bits,
            is_floats=self._kind is Numbers.FP8,
            tile_outputs=_SUM_OUTPUTS,
            tile_inputs=self._tile(_SUM_TILE),
            num_tiles=_SUM_INPUTS // self._tile(_SUM_TILE),
            is_whole=self.in_features % _SUM_INPUTS == 0,
            num_warps=4,
        )

    def _multiply(self, x: Tensor, y: Tensor, tiling: _Tiling) -> None:
        num_rows, cut = len(x), self._parts[tiling]
        sums = product_parts.memory(cut.num_parts, y)
        grid = (
            triton.cdiv(self.out_features, tiling.outputs),
            cut.num_parts,
            triton.cdiv(num_rows, tiling.max_rows),
        )
        grouped.multiply[grid](
            x,
            self._numbers,
            self._offsets,
            self._scales,
            self._bias if cut.num_parts == 1 else None,
            sums,
            num_rows,
            self.out_features,
            self.in_features,
            cut.size,
            group_size=self._group_size,
            bits=self._kind.bits,
            is_floats=self._kind is Numbers.FP8,
            is_single=self._is_single,
            tile_rows=tiling.rows,
            has_others=tiling.has_others,
            tile_outputs=tiling.outputs,
            tile_inputs=self._tile(tiling.inputs),
            asm=x.dtype is torch.bfloat16 and isinstance(grouped.multiply, JITFunction),
            num_tiles=tiling.num_tiles,
            num_warps=tiling.num_warps,
            maxnreg=_NUM_REGISTERS,
        )
        if cut.num_parts > 1:
            product_parts.add(sums, self._bias, y)

    def _multiply_widened(self, x: Tensor, y: Tensor) -> None:
        """By torch's product, of as many outputs at a time as there is memory for."""
        step = max(1, _MAX_WIDENED_BYTES // (self.in_features * x.itemsize))
        step = min(step, _MAX_PROGRAMS * _WIDENED_ROWS)
        for begin in range(0, self.out_features, step):
            end = min(begin + step, self.out_features)
            self._multiply_part(x, y[:, begin:end], begin, end)

    def _multiply_part(self, x: Tensor, y: Tensor, begin: int, end: int) -> None:
        """What is widened for it is gone with it: the next part takes the same memory."""
        weight = self._widened(begin, end, x)
        if self._bias is None:
            torch.mm(x, weight.t(), out=y)
        else:
            torch.addmm(self._bias[begin:end], x, weight.t(), out=y)

    def _widened(self, begin: int, end: int, like: Tensor) -> Tensor:
        """Of some outputs, by columns. [end - begin, in_features], of the inputs' type."""
        weight = like.new_empty(end - begin, self.in_features)
        num_bytes = self.in_features * self._kind.bits // 8
        grid = triton.cdiv(num_bytes, _WIDENED_BYTES), triton.cdiv(end - begin, _WIDENED_ROWS)
        grouped.widen[grid](
            self._numbers,
            self._offsets,
            self._scales,
            weight,
            begin,
            end - begin,
            self.out_features,
            self.in_features,
            group_size=self._group_size,
            bits=self._kind.bits,
            is_floats=self._kind is Numbers.FP8,
            tile_rows=_WIDENED_ROWS,
            tile_bytes=_WIDENED_BYTES,
            num_warps=4,
        )
        return weight

    def _tile(self, inputs: int) -> int:
        return math.gcd(self._group_size, inputs)

    @property
    def _is_single(self) -> bool:
        return self._group_size == self.in_features
