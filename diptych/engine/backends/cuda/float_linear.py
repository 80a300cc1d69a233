"""Linear layers in 16-bit floats: one row is summed by a kernel of ours, more are torch's."""

from torch import Tensor

from diptych.engine.backends.cuda.row_sums import sum_row
from diptych.engine.backends.torch.linear import PlainLinear


class FloatLinear:
    """Implements ``Linear``. One row alone is another sum than it is among others."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight: [out_features, in_features], contiguous, of as many bits as the inputs."""
        self._weight, self._bias = weight, bias
        self._of_rows = PlainLinear(weight, bias)
        self.out_features, self.in_features = weight.shape

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if len(x) != 1:
            return self._of_rows(x, out)
        y = x.new_empty(1, self.out_features) if out is None else out
        sum_row(x, None, self._weight, None, None, self._bias, y)
        return y
