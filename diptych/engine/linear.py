"""The seam of matrix products with weights: how a layer's weight is kept and applied.

oneDNN repacks a plain weight at every call, which costs a factor of two at decode
batch sizes; packed once for a batch of about 16, it is within a few per cent of
the best at every batch size. The packing operators are private to torch, so they
are proven at first use, per element type, and :class:`PlainLinear` is the
fallback. Nothing else knows how weights are stored.
"""

from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

_PACK_FOR_ROWS = 16


class Linear(Protocol):
    """``y = x @ weight.T + bias``; a row's result does not depend on its neighbours."""

    @property
    def in_features(self) -> int: ...
    @property
    def out_features(self) -> int: ...
    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_rows, in_features] -> [num_rows, out_features], same element type."""
        ...


class PlainLinear:
    """torch's own linear on the weight as loaded."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias  # [out_features, in_features], [out_features]
        self.out_features, self.in_features = weight.shape

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


class PackedLinear:
    """A weight packed once for oneDNN on the CPU; the plain one is not kept."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._bias = bias
        self.out_features, self.in_features = weight.shape
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(
            weight.contiguous(), _PACK_FOR_ROWS
        )

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return y


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The fastest linear that works here. weight: [out_features, in_features]."""
    if weight.device.type == "cpu" and packing_works(weight.dtype):
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)


@cache
def packing_works(dtype: torch.dtype) -> bool:
    """Whether this torch packs weights of ``dtype`` and multiplies right with them."""
    with torch.inference_mode():
        weight = torch.linspace(-1, 1, 48 * 80).sin().view(80, 48).to(dtype)
        bias = torch.linspace(-1, 1, 80).to(dtype)
        tolerance = 8 * torch.finfo(dtype).eps
        try:
            packed = PackedLinear(weight, bias)
            for num_rows in (1, 5, 33):
                x = torch.linspace(-2, 2, num_rows * 48).cos().view(num_rows, 48).to(dtype)
                expected = F.linear(x.double(), weight.double(), bias.double())
                error = (packed(x).double() - expected).abs().max() / expected.abs().max()
                if not error <= tolerance:
                    return False
        except (AttributeError, RuntimeError, TypeError):
            return False
    return True
