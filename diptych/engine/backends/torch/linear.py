"""Linear layers in torch's own operators: any device, any element type."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


class PlainLinear:
    """The weight as loaded."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias  # [out_features, in_features], [out_features]
        self.out_features, self.in_features = weight.shape

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if out is None:
            return F.linear(x, self._weight, self._bias)
        if self._bias is None:
            return torch.mm(x, self._weight.t(), out=out)
        return torch.addmm(self._bias, x, self._weight.t(), out=out)
