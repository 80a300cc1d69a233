"""Linear layers in 8-bit floats by own products for few rows, and by torch's for many."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from diptych.engine.backends.cuda import product_parts
from diptych.engine.backends.cuda.kernels import fp8
from diptych.engine.backends.cuda.product_parts import Parts
from diptych.engine.backends.cuda.row_sums import sum_row
from diptych.engine.backends.torch.fp8_linear import (
    Fp8Weights,
    Rounded,
    ScaledFp8Linear,
    check_products,
    filled_size,
)
from diptych.engine.model.fp8 import Fp8Weight
from diptych.engine.model.parts import Linear
from diptych.errors import ConfigurationError


class _Tiling(NamedTuple):
    """What a program of a product of some rows does."""

    rows: int  # that it is for
    outputs: int
    inputs: int
    num_tiles: int  # of inputs, that are fetched ahead
    num_warps: int


_CHECKED_INPUTS = 2048
# One row is summed without a matrix unit; more rows than these are torch's.
_TILINGS = (_Tiling(16, 64, 256, 4, 4), _Tiling(64, 64, 128, 6, 4))


class DeviceFp8Linear:
    """Implements ``Linear``. A row is rounded by itself, to the same bits in any batch.

    Its result has the same bits in any batch of 2 to 16, and in any of 17 to 64.
    """

    def __init__(self, weight: Fp8Weight, bias: Tensor | None, num_processors: int) -> None:
        """weight: copied where its sizes are no multiples of 16."""
        self._many = ScaledFp8Linear(weight, bias)
        self.out_features, self.in_features = weight.numbers.shape
        self._numbers, self._scales = self._many.numbers, self._many.scales
        self._bias = bias
        num_columns = self._numbers.shape[1]
        self._parts = {
            tiling: Parts.of(
                num_columns,
                tiling.inputs,
                triton.cdiv(self.out_features, tiling.outputs),
                num_processors,
            )
            for tiling in _TILINGS
        }

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        y = x.new_empty(len(x), self.out_features) if out is None else out
        if len(x):
            self.multiply_rounded(round_rows(x), y)
        return y

    def multiply_rounded(self, rows: Rounded, out: Tensor) -> None:
        """rows: as many columns as ``round_rows`` made of them. out: [num_rows, out_features]."""
        tiling = next((each for each in _TILINGS if len(out) <= each.rows), None)
        if len(out) == 1:
            numbers = self._numbers[: self.out_features]
            sum_row(rows.numbers, rows.scales, numbers, None, self._scales, self._bias, out)
        elif tiling is not None:
            self._multiply(rows, out, tiling)
        else:
            self._many.multiply_rounded(rows, out)

    def _multiply(self, rows: Rounded, y: Tensor, tiling: _Tiling) -> None:
        num_rows, num_columns = rows.numbers.shape
        cut = self._parts[tiling]
        sums = product_parts.memory(cut.num_parts, y)
        grid = (
            triton.cdiv(self.out_features, tiling.outputs),
            cut.num_parts,
            triton.cdiv(num_rows, tiling.rows),
        )
        fp8.multiply_rounded[grid](
            rows.numbers,
            rows.scales,
            self._numbers,
            self._scales,
            self._bias if cut.num_parts == 1 else None,
            sums,
            num_rows,
            self.out_features,
            num_columns,
            cut.size,
            is_whole=num_columns % tiling.inputs == 0,
            tile_rows=tiling.rows,
            tile_outputs=tiling.outputs,
            tile_inputs=tiling.inputs,
            num_tiles=tiling.num_tiles,
            num_warps=tiling.num_warps,
        )
        if cut.num_parts > 1:
            product_parts.add(sums, self._bias, y)


def round_rows(x: Tensor) -> Rounded:
    """In one launch. x: [num_rows, size]."""
    num_rows, size = x.shape
    rows = memory_of(num_rows, size, x.device)
    num_columns = rows.numbers.shape[1]
    width = triton.next_power_of_2(num_columns)
    fp8.round_rows[(num_rows,)](
        x.contiguous(),
        rows.numbers,
        rows.scales,
        size,
        num_columns,
        width=width,
        num_warps=min(32, max(4, width // 512)),
    )
    return rows


def memory_of(num_rows: int, size: int, device: torch.device) -> Rounded:
    """For rows that a kernel rounds: as many columns as products take, zeros behind the size."""
    num_columns = filled_size(size)
    return Rounded(
        torch.empty(num_rows, num_columns, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(num_rows, 1, device=device),
    )


class DeviceFp8Weights(Fp8Weights):
    """Implements ``Fp8Store`` where there are e4m3 products, or they are interpreted."""

    def __init__(self, device: torch.device, dtype: torch.dtype, num_processors: int) -> None:
        super().__init__(device, dtype)
        self._num_processors = num_processors

    def check(self) -> None:
        """Each of the products for rows of some number, on this device.

        Raises ConfigurationError: it does not do them, or does others.
        """
        nums_rows = (1, *(tiling.rows for tiling in _TILINGS), _TILINGS[-1].rows + 1)
        try:
            check_products(self, self._scaled, _CHECKED_INPUTS, nums_rows)
        except Exception as error:  # what torch or triton lacks they say in any way
            raise ConfigurationError(
                f"quantization fp8: the device does not multiply right ({error})"
            ) from error

    def _scaled(self, weight: Fp8Weight, bias: Tensor | None) -> Linear:
        return DeviceFp8Linear(weight, bias, self._num_processors)
