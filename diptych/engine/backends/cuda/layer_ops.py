"""A layer's row-wise operations as Triton kernels."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from diptych.engine.backends.cuda.fp8_linear import DeviceFp8Linear, memory_of
from diptych.engine.backends.cuda.kernels import heads, rows
from diptych.engine.backends.torch.fp8_linear import Rounded
from diptych.engine.model.config import ModelConfig
from diptych.engine.model.layer_config import Activation
from diptych.engine.model.parts import Linear, Rotation

_SPAN = 1024  # numbers of a row that one program gates


class _Rows(NamedTuple):
    """What was written last, and rounded beside."""

    address: int
    shape: torch.Size
    rounded: Rounded


class _Beside(NamedTuple):
    """What a kernel is told of it."""

    numbers: Tensor | None
    scales: Tensor | None
    num_columns: int  # of the numbers, or of the rows themselves


class TritonLayerOps:
    """Of one model. Implements ``LayerOps``.

    Of a model in 8-bit floats the norms round their results too, where rows are at hand: a launch
    for each product is spared. That lasts until the next product. Gates do not, as they are cut
    into spans: on an H200 a row of 14,336 took 4.6 us as one, and takes 1.5 in spans.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._takes_rounded = False  # whether a product was one of 8-bit floats
        self._last: _Rows | None = None

    def multiply(self, linear: Linear, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Of 8-bit floats those that lie beside x, if it is what was normed just now."""
        last, self._last = self._last, None
        if not isinstance(linear, DeviceFp8Linear):
            return linear(x, out)
        self._takes_rounded = True
        if last is None or (last.address, last.shape) != (x.data_ptr(), x.shape):
            return linear(x, out)
        y = x.new_empty(len(x), linear.out_features) if out is None else out
        linear.multiply_rounded(last.rounded, y)
        return y

    def norm(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        num_rows, size = x.shape
        beside = self._beside(out)
        width = triton.next_power_of_2(beside.num_columns)
        rows.norm[(num_rows,)](
            x,
            weight,
            out,
            beside.numbers,
            beside.scales,
            size,
            beside.num_columns,
            self._config.rms_norm_eps,
            width=width,
            num_warps=_num_warps(width),
        )

    def add_norm(
        self, x: Tensor, y: Tensor, y_weight: Tensor | None, weight: Tensor | None, out: Tensor
    ) -> None:
        num_rows, size = x.shape
        beside = self._beside(out, is_wanted=weight is not None)
        width = triton.next_power_of_2(beside.num_columns)
        rows.add_norm[(num_rows,)](
            x,
            y,
            y_weight,
            weight,
            out,
            beside.numbers,
            beside.scales,
            size,
            beside.num_columns,
            self._config.rms_norm_eps,
            width=width,
            num_warps=_num_warps(width),
        )

    def rotate(
        self,
        qkv: Tensor,
        rotation: Rotation,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        q: Tensor,
        kv: Tensor,
    ) -> None:
        config = self._config
        query_width = triton.next_power_of_2(config.num_heads)
        half_width = triton.next_power_of_2(config.head_dim // 2)
        heads.rotate[(len(qkv),)](
            qkv,
            rotation.cos,
            rotation.sin,
            q_weight,
            k_weight,
            q,
            kv,
            config.rms_norm_eps,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            query_width=query_width,
            key_width=triton.next_power_of_2(config.num_kv_heads),
            half_width=half_width,
            num_warps=_num_warps(2 * query_width * half_width),
        )

    def gate(self, gate_up: Tensor, out: Tensor) -> None:
        self._last = None
        num_rows, size = out.shape
        rows.gate[(num_rows, triton.cdiv(size, _SPAN))](
            gate_up,
            out,
            size,
            is_gelu=self._config.activation is Activation.GELU_TANH,
            width=min(_SPAN, triton.next_power_of_2(size)),
            num_warps=4,
        )

    def multiply_gated(self, linear: Linear, x: Tensor, gate_up: Tensor, out: Tensor) -> None:
        self.multiply(linear, x, gate_up)
        self.gate(gate_up, out)

    def _beside(self, out: Tensor, *, is_wanted: bool = True) -> "_Beside":
        """Memory for the same in 8-bit floats, for the next product, if such are multiplied."""
        self._last = None
        if not is_wanted or not self._takes_rounded:
            return _Beside(None, None, out.shape[1])
        rounded = memory_of(len(out), out.shape[1], out.device)
        self._last = _Rows(out.data_ptr(), out.shape, rounded)
        return _Beside(*rounded, rounded.numbers.shape[1])


def _num_warps(width: int) -> int:
    """For a program that holds so many numbers: 32 of them a thread, if there are many."""
    return min(16, max(4, width // 1024))
