"""Linear layers in 8-bit floats: a scale for each output channel, and for each row of inputs.

Weights are e4m3 numbers times a scale per output; the inputs of each step are rounded so by
rows, and torch multiplies both as they are, with sums in float32. A row is rounded by itself.
"""

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from diptych.engine.model.fp8 import Fp8Weight
from diptych.engine.model.parts import Linear
from diptych.errors import ConfigurationError

_LOG = logging.getLogger(__name__)
LARGEST = 448.0  # that e4m3 has
_TINY = 1e-30  # a scale below this is zero: its reciprocal would overflow
_SLICE_ROWS = 512  # of a weight, that are rounded at a time
_MULTIPLE = 16  # of inputs and outputs, that torch's product takes; others are filled up


class Rounded(NamedTuple):
    """Rows as ``numbers * scales``."""

    numbers: Tensor  # [num_rows, size] e4m3
    scales: Tensor  # [num_rows, 1] float32; NaN for a row that is not all finite


def round_rows(rows: Tensor) -> Rounded:
    """Each row by its largest magnitude. rows: [num_rows, size], any float.

    The error of a number is at most a sixteenth of it, or 2**-10 of its row's scale.
    """
    rows = rows.float()
    scales = rows.abs().amax(1, keepdim=True) / LARGEST
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    ratios = torch.where(scales > _TINY, 1 / scales, scales * 0)
    # Rounding of the ratio must not lift the largest over what there is.
    numbers = (rows * ratios).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return Rounded(numbers, scales)


class PlainFp8Linear:
    """By definition, from widened numbers. On any device and of any shape; slow."""

    def __init__(self, weight: Fp8Weight, bias: Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias
        self.out_features, self.in_features = weight.numbers.shape

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        rows = round_rows(x)
        y = F.linear(rows.numbers.float(), self._weight.numbers.float())
        y = y * rows.scales * self._weight.scales.t()
        if self._bias is not None:
            y += self._bias
        return y.to(x.dtype) if out is None else out.copy_(y)


class ScaledFp8Linear:
    """By torch's product of 8-bit floats, of sizes that it takes: what lacks is zeros."""

    def __init__(self, weight: Fp8Weight, bias: Tensor | None = None) -> None:
        """weight: copied where its sizes are no multiples of 16."""
        self.out_features, self.in_features = weight.numbers.shape
        num_rows, num_columns = map(filled_size, weight.numbers.shape)
        lacking = num_rows - self.out_features
        self.numbers = _filled_up(weight.numbers, num_rows, num_columns)
        self.scales = F.pad(weight.scales, (0, 0, 0, lacking)) if lacking else weight.scales
        self._bias = bias if bias is None or not lacking else F.pad(bias, (0, lacking))

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        y = x.new_empty(len(x), self.out_features) if out is None else out
        if len(x):
            self.multiply_rounded(round_rows(x), y)
        return y

    def multiply_rounded(self, rows: Rounded, out: Tensor) -> None:
        """rows: filled up, or not yet. out: [num_rows, out_features]."""
        num_outputs, num_columns = self.numbers.shape
        is_whole = num_outputs == self.out_features
        y = out if is_whole else out.new_empty(len(out), num_outputs)
        torch._scaled_mm(
            _filled_up(rows.numbers, len(out), num_columns),
            self.numbers.t(),
            scale_a=rows.scales,
            scale_b=self.scales.t(),
            bias=self._bias,
            out_dtype=out.dtype,
            out=y,
        )
        if not is_whole:
            out.copy_(y[:, : self.out_features])


def filled_size(size: int) -> int:
    """Of inputs or outputs, as torch's product takes them."""
    return -(-size // _MULTIPLE) * _MULTIPLE


def _filled_up(numbers: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """With zeros, to so many. numbers: [.., ..] e4m3; as it is where nothing lacks."""
    lacking = (0, num_columns - numbers.shape[1], 0, num_rows - numbers.shape[0])
    if not any(lacking):
        return numbers
    return F.pad(numbers.view(torch.uint8), lacking).view(numbers.dtype)


class Fp8Weights:
    """Implements ``Fp8Store``."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        """dtype: of inputs and results."""
        self.device, self.dtype = device, dtype

    def allocate(self, num_rows: int, num_columns: int) -> Fp8Weight:
        return Fp8Weight(
            torch.empty(num_rows, num_columns, dtype=torch.float8_e4m3fn, device=self.device),
            torch.empty(num_rows, 1, device=self.device),
        )

    def rounded(self, weight: Tensor) -> Fp8Weight:
        """A float weight. Raises ConfigurationError: it is not finite."""
        result = self.allocate(*weight.shape)
        for begin in range(0, len(weight), _SLICE_ROWS):
            part = slice(begin, begin + _SLICE_ROWS)
            result.numbers[part], result.scales[part] = round_rows(weight[part])
        return result

    def linear(self, weight: Fp8Weight, bias: Tensor | None) -> Linear:
        if not bool(weight.scales.isfinite().all()):
            raise ConfigurationError("quantization fp8: a weight is not a finite number")
        if works(self.device, self.dtype):
            return self._scaled(weight, bias)
        return PlainFp8Linear(weight, bias)

    def _scaled(self, weight: Fp8Weight, bias: Tensor | None) -> Linear:
        """Where torch has such products."""
        return ScaledFp8Linear(weight, bias)


@cache
def works(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch multiplies 8-bit floats here, and right; if not, that is logged."""
    try:
        check_products(Fp8Weights(device, dtype), ScaledFp8Linear, 48, (1, 16, 33))
    except Exception as error:  # noqa: BLE001 (what torch lacks it says in any way)
        _LOG.warning(
            "torch's product of 8-bit floats is not usable: slow ones instead",
            extra={"device": str(device), "dtype": str(dtype)},
            exc_info=error,
        )
        return False
    return True


@torch.inference_mode()
def check_products(
    weights: Fp8Weights,
    multiplied: Callable[[Fp8Weight, Tensor | None], Linear],
    num_inputs: int,
    nums_rows: Sequence[int],
) -> None:
    """Of so many rows each, with a bias, by the definition.

    Raises ArithmeticError: they are others; and what they raise themselves.
    """
    device, dtype = weights.device, weights.dtype
    generator = torch.Generator().manual_seed(0)
    floats = torch.randn(48 + max(nums_rows), num_inputs, generator=generator).to(device)
    weight = weights.rounded(floats[:48])
    bias = floats[0, :48].to(dtype)
    for num_rows in nums_rows:
        x = floats[-num_rows:].to(dtype)
        want = PlainFp8Linear(weight, bias)(x).double()
        got = multiplied(weight, bias)(x).double()
        error = (got - want).abs().max() / want.abs().max()
        if not error <= 8 * torch.finfo(dtype).eps:
            raise ArithmeticError(f"relative error {float(error):.1e}, of {num_rows} rows")
