"""A layer's row-wise operations as Triton kernels."""

import triton
from torch import Tensor

from diptych.engine.backends.cuda.kernels import heads, rows
from diptych.engine.model.config import ModelConfig
from diptych.engine.model.layer_config import Activation
from diptych.engine.model.parts import Linear, Rotation

_SPAN = 1024  # numbers of a row that one program gates


class TritonLayerOps:
    """Of one model. Implements ``LayerOps``."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config

    def multiply(self, linear: Linear, x: Tensor, out: Tensor) -> None:
        linear(x, out)

    def norm(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        num_rows, size = x.shape
        width = triton.next_power_of_2(size)
        rows.norm[(num_rows,)](
            x,
            weight,
            out,
            size,
            self._config.rms_norm_eps,
            width=width,
            num_warps=_num_warps(width),
        )

    def add_norm(
        self, x: Tensor, y: Tensor, y_weight: Tensor | None, weight: Tensor | None, out: Tensor
    ) -> None:
        num_rows, size = x.shape
        width = triton.next_power_of_2(size)
        rows.add_norm[(num_rows,)](
            x,
            y,
            y_weight,
            weight,
            out,
            size,
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


def _num_warps(width: int) -> int:
    """For a program that holds so many numbers: 32 of them a thread, if there are many."""
    return min(16, max(4, width // 1024))
