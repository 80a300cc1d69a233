"""A linear layer in int8: a scale for each output channel, and for each span of an input row.

Symmetric: a weight row is its scale times -127..127, and so is each span of 64 inputs
of a row, with a scale of its own (one scale for a whole row costs SmolLM2 twice
the perplexity lost). A row's result depends on that row alone, bit for bit, at
every batch size and with every kernel. For float32 inputs.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from diptych.errors import ConfigurationError

SPAN = 64  # inputs of a row that share a scale
SLICE_ROWS = 512  # of a weight, that are quantised at a time
_TINY = 1e-30  # a scale below this is zero: its reciprocal would overflow


class Quantised(NamedTuple):
    """Rows as ``values * scales[:, None]``."""

    values: Tensor  # [num_rows, size] int8, -127 to 127
    scales: Tensor  # [num_rows] float32; NaN for a row that is not all finite

    def widened(self) -> Tensor:
        """The float32 rows that it stands for. [num_rows, size]."""
        return self.values * self.scales[:, None]


def quantise(rows: Tensor) -> Quantised:
    """Each row by its largest magnitude. rows: [num_rows, size] float32.

    The error of a value is at most half its row's scale.
    """
    largest = rows.abs().amax(1)  # NaN where any is
    scales = torch.where(largest.isfinite(), largest / 127, torch.nan)
    ratios = torch.where(scales > _TINY, 1 / scales, 0)
    values = (rows * ratios[:, None]).nan_to_num_().round_().to(torch.int8)
    return Quantised(values, scales)


def quantise_weight(weight: Tensor) -> Quantised:
    """A whole weight, a part at a time so that little memory is taken.

    weight: [out_features, in_features], any float.

    Raises:
        ConfigurationError: the weight is not finite.
    """
    slices = [quantise(rows.float()) for rows in weight.tensor_split(-(-len(weight) // SLICE_ROWS))]
    quantised = Quantised(*(torch.cat(parts) for parts in zip(*slices, strict=True)))
    if not bool(quantised.scales.isfinite().all()):
        raise ConfigurationError("quantization to int8: a weight is not a finite number")
    return quantised


class PlainInt8Linear:
    """In torch's public operators, for any machine, slowly. The reference of the others."""

    def __init__(self, weight: Quantised, bias: Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias
        self.out_features, self.in_features = weight.values.shape

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        whole, rest = divmod(self.in_features, SPAN)
        spans = [SPAN] * whole + [rest] * bool(rest)
        y = x.new_empty(len(x), self.out_features) if out is None else out
        y.zero_()
        for inputs, values in zip(
            x.split_with_sizes(spans, 1),
            self._weight.values.split_with_sizes(spans, 1),
            strict=True,
        ):
            rows = quantise(inputs)
            # A span's sums are below 2**24: exact in float32.
            y += F.linear(rows.values.float(), values.float()) * rows.scales[:, None]
        y *= self._weight.scales
        return y if self._bias is None else y.add_(self._bias)
