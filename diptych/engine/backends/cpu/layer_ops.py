"""A layer's row-wise operations: norms, residual sums, rotary embedding, gates.

One call each between two matrix products, behind one seam: compiled loops for
float32 on the CPU, where torch's operators would cost more than the arithmetic,
torch's operators everywhere else. Model thread only.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from diptych.engine.model.config import Activation, ModelConfig

if TYPE_CHECKING:
    from diptych.engine.backends.cpu.kernels.loop import Call


class Rotation(NamedTuple):
    """Rotary embedding at the positions of a step's rows."""

    cos: Tensor  # [N, head_dim / 2] float32
    sin: Tensor

    @classmethod
    def at(cls, positions: Tensor, frequencies: Tensor) -> "Rotation":
        """positions: [N]; frequencies: [head_dim / 2] float32, angle per position."""
        angles = positions.float()[:, None] * frequencies
        return cls(angles.cos(), angles.sin())


class LayerOps(Protocol):
    """Row-wise operations of one model; rows do not influence each other."""

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm. x: [N, size]; weight: [size] float32."""
        ...

    def add(self, x: Tensor, y: Tensor, y_weight: Tensor | None) -> None:
        """Add y to x in place, normed where it has a weight. x, y: [N, hidden_size]."""
        ...

    def add_norm(self, x: Tensor, y: Tensor, y_weight: Tensor | None, weight: Tensor) -> Tensor:
        """As ``add``, and return the norm of the sum."""
        ...

    def rotate(
        self, qkv: Tensor, rotation: Rotation, q_weight: Tensor | None, k_weight: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Norm (where weights are given) and rotate queries and keys.

        qkv: [N, (num_heads + 2 * num_kv_heads) * head_dim] -> q [N, num_heads, head_dim],
        kv [N, 2, num_kv_heads, head_dim], both contiguous.
        """
        ...

    def gate(self, gate_up: Tensor) -> Tensor:
        """activation(gate) * up. gate_up: [N, 2 * size] -> [N, size]."""
        ...


def make_layer_ops(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> LayerOps:
    """The fastest that works here. The first compiled ones of a machine take seconds to make."""
    torch_ops = TorchLayerOps(config, dtype)
    if dtype is not torch.float32 or device.type != "cpu" or find_spec("numba") is None:
        return torch_ops
    compiled = CompiledLayerOps(config)
    return compiled if _agree(compiled, torch_ops, config) else torch_ops


@torch.inference_mode()
def _agree(ops: LayerOps, others: LayerOps, config: ModelConfig) -> bool:
    """Whether two implementations give the same results on a few rows, and on many."""
    head_dim, hidden, inner = config.head_dim, config.hidden_size, config.intermediate_size
    weight, head_weight = torch.linspace(0.5, 2, hidden), torch.linspace(0.5, 2, head_dim)
    num_heads = config.num_heads + 2 * config.num_kv_heads

    def results(ops: LayerOps, num_rows: int) -> list[Tensor]:
        def rows(size: int) -> Tensor:
            return torch.linspace(-6, 6, num_rows * size).sin_().mul_(4).view(num_rows, size)

        rotation = Rotation.at(torch.arange(num_rows), torch.linspace(1, 0, head_dim // 2))
        plain, normed = rows(hidden), rows(hidden)
        ops.add(plain, rows(hidden), None)
        return [
            plain,
            ops.norm(rows(hidden), weight),
            ops.add_norm(normed, rows(hidden), weight, weight),
            normed,
            *ops.rotate(rows(num_heads * head_dim), rotation, None, None),
            *ops.rotate(rows(num_heads * head_dim), rotation, head_weight, head_weight),
            ops.gate(rows(2 * inner)),
        ]

    return all(
        torch.allclose(got, want, rtol=1e-4, atol=1e-4)
        for num_rows in (3, 300)
        for got, want in zip(results(ops, num_rows), results(others, num_rows), strict=True)
    )


class TorchLayerOps:
    """Any element type and device."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._config, self._dtype = config, dtype

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        normed = F.rms_norm(x.float(), weight.shape, weight, self._config.rms_norm_eps)
        return normed.to(self._dtype)

    def add(self, x: Tensor, y: Tensor, y_weight: Tensor | None) -> None:
        x += y if y_weight is None else self.norm(y, y_weight)

    def add_norm(self, x: Tensor, y: Tensor, y_weight: Tensor | None, weight: Tensor) -> Tensor:
        self.add(x, y, y_weight)
        return self.norm(x, weight)

    def rotate(
        self, qkv: Tensor, rotation: Rotation, q_weight: Tensor | None, k_weight: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        num_heads, num_kv_heads = self._config.num_heads, self._config.num_kv_heads
        heads = qkv.view(len(qkv), -1, self._config.head_dim)
        q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], 1)
        if q_weight is not None and k_weight is not None:
            q, k = self.norm(q, q_weight), self.norm(k, k_weight)
        cos, sin = (part.to(self._dtype)[:, None] for part in rotation)
        return _rotated(q, cos, sin), torch.stack((_rotated(k, cos, sin), v), 1)

    def gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if self._config.activation is Activation.SILU:
            return F.silu(gate).mul_(up)
        return F.gelu(gate, approximate="tanh").mul_(up)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [N, heads, head_dim]; its two halves are the pairs' first and second parts."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class CompiledLayerOps:
    """float32 on the CPU, one compiled loop each."""

    _SERIAL_SIZE = 1 << 15  # numbers; below, starting threads costs more than they do

    def __init__(self, config: ModelConfig) -> None:
        # Here, because numba is optional and takes a while to import.
        from diptych.engine.backends.cpu.layer_calls import LayerCalls

        self._calls = LayerCalls(config)
        self._config = config

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        out = torch.empty_like(x)
        self._run(self._calls.norm(x, weight, out), x)
        return out

    def add(self, x: Tensor, y: Tensor, y_weight: Tensor | None) -> None:
        self._run(self._calls.add_norm(x, y, y_weight, None, None), x)

    def add_norm(self, x: Tensor, y: Tensor, y_weight: Tensor | None, weight: Tensor) -> Tensor:
        out = torch.empty_like(x)
        self._run(self._calls.add_norm(x, y, y_weight, weight, out), x)
        return out

    def rotate(
        self, qkv: Tensor, rotation: Rotation, q_weight: Tensor | None, k_weight: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        config = self._config
        q = torch.empty(len(qkv), config.num_heads, config.head_dim)
        kv = torch.empty(len(qkv), 2, config.num_kv_heads, config.head_dim)
        self._run(self._calls.rotate(qkv, *rotation, q_weight, k_weight, q, kv), qkv)
        return q, kv

    def gate(self, gate_up: Tensor) -> Tensor:
        out = torch.empty(len(gate_up), gate_up.shape[1] // 2)
        self._run(self._calls.gate(gate_up, out), gate_up)
        return out

    def _run(self, call: "Call", x: Tensor) -> None:
        call.run(1 if x.numel() < self._SERIAL_SIZE else torch.get_num_threads())
