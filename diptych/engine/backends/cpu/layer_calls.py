"""A layer's row-wise operations as calls of compiled loops: float32 on the CPU.

Each makes a call that is run by itself, or as a part of a program; importing
this compiles the loops, or finds them in the cache. Tensors are contiguous.
"""

import torch
from torch import Tensor

from diptych.engine.backends.cpu.kernels import layer_loops
from diptych.engine.backends.cpu.kernels.loop import Call
from diptych.engine.model.config import Activation, ModelConfig

_ITEM_SIZE = 1 << 11  # numbers


class LayerCalls:
    """Of one model. ``N`` rows."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._eps = torch.tensor([config.rms_norm_eps], dtype=torch.float32)
        self._ones = torch.ones(config.head_dim)

    def norm(self, x: Tensor, weight: Tensor, out: Tensor) -> Call:
        """out = norm(x). x, out: [N, size]; weight: [size]."""
        num_items, rows_per_item = _split(x)
        return layer_loops.norm.call(num_items, rows_per_item, *x.shape, x, weight, self._eps, out)

    def add_norm(
        self,
        x: Tensor,
        y: Tensor,
        y_weight: Tensor | None,
        weight: Tensor | None,
        out: Tensor | None,
    ) -> Call:
        """x += y, normed where it has a weight; out = norm(x) where that has one.

        x, y, out: [N, hidden_size]; y and out may be one.
        """
        num_items, rows_per_item = _split(x)
        return layer_loops.add_norm.call(
            num_items,
            rows_per_item,
            *x.shape,
            x,
            y,
            0 if y_weight is None else y_weight,
            0 if weight is None else weight,
            self._eps,
            0 if out is None else out,
        )

    def rotate(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        q: Tensor,
        kv: Tensor,
    ) -> Call:
        """qkv: [N, (num_heads + 2 * num_kv_heads) * head_dim]; cos, sin: [N, head_dim / 2].

        q: [N, num_heads, head_dim], kv: [N, 2, num_kv_heads, head_dim]: the results.
        """
        config = self._config
        num_items, rows_per_item = _split(qkv)
        return layer_loops.rotate.call(
            num_items,
            rows_per_item,
            len(qkv),
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            qkv,
            cos,
            sin,
            self._ones if q_weight is None else q_weight,
            self._ones if k_weight is None else k_weight,
            q_weight is not None,
            self._eps,
            q,
            kv,
        )

    def gate(self, gate_up: Tensor, out: Tensor) -> Call:
        """out = activation(gate) * up. gate_up: [N, 2 * size]; out: [N, size]."""
        num_items, rows_per_item = _split(gate_up)
        is_gelu = self._config.activation is Activation.GELU_TANH
        return layer_loops.gate.call(num_items, rows_per_item, *out.shape, is_gelu, gate_up, out)


def _split(x: Tensor) -> tuple[int, int]:
    """Items of x's rows, and rows in each."""
    num_rows, size = x.shape
    rows_per_item = max(1, _ITEM_SIZE // size)
    return -(-num_rows // rows_per_item), rows_per_item
