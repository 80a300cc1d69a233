"""A layer's row-wise operations in torch's operators: any device, any element type."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from diptych.engine.model.config import ModelConfig
from diptych.engine.model.layer_config import Activation
from diptych.engine.model.parts import Linear, Rotation


class TorchLayerOps:
    """Of one model. Implements ``LayerOps``."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._config, self._dtype = config, dtype

    def multiply(self, linear: Linear, x: Tensor, out: Tensor | None = None) -> Tensor:
        return linear(x, out)

    def norm(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        out.copy_(self._normed(x, weight))

    def add_norm(
        self, x: Tensor, y: Tensor, y_weight: Tensor | None, weight: Tensor | None, out: Tensor
    ) -> None:
        x += y if y_weight is None else self._normed(y, y_weight)
        if weight is not None:
            self.norm(x, weight, out)

    def rotate(
        self,
        qkv: Tensor,
        rotation: Rotation,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        q: Tensor,
        kv: Tensor,
    ) -> None:
        num_heads, num_kv_heads = self._config.num_heads, self._config.num_kv_heads
        heads = qkv.view(len(qkv), -1, self._config.head_dim)
        queries, keys, values = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], 1)
        if q_weight is not None and k_weight is not None:
            queries, keys = self._normed(queries, q_weight), self._normed(keys, k_weight)
        cos, sin = (part.to(self._dtype)[:, None] for part in rotation)
        _rotate(queries, cos, sin, q)
        _rotate(keys, cos, sin, kv[:, 0])
        kv[:, 1] = values

    def gate(self, gate_up: Tensor, out: Tensor) -> None:
        gate, up = gate_up.chunk(2, dim=-1)
        if self._config.activation is Activation.SILU:
            torch.mul(F.silu(gate), up, out=out)
        else:
            torch.mul(F.gelu(gate, approximate="tanh"), up, out=out)

    def multiply_gated(self, linear: Linear, x: Tensor, gate_up: Tensor, out: Tensor) -> None:
        self.multiply(linear, x, gate_up)
        self.gate(gate_up, out)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        normed = F.rms_norm(x.float(), weight.shape, weight, self._config.rms_norm_eps)
        return normed.to(self._dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """x, out: [N, heads, head_dim]; their halves are the pairs' first and second parts."""
    first, second = x.chunk(2, dim=-1)
    out_first, out_second = out.chunk(2, dim=-1)
    out_first.copy_(first * cos - second * sin)
    out_second.copy_(second * cos + first * sin)
