"""A layer's row-wise operations in compiled loops: float32 on the CPU.

Importing this compiles the loops, or finds them in the cache. Each operation is made
into a call, which is run at once or becomes part of a program.
"""

import torch
from torch import Tensor

from diptych.engine.backends.cpu.kernels import layer_loops
from diptych.engine.backends.cpu.kernels.loop import Call
from diptych.engine.backends.cpu.linear import CompiledLinear, GatingLinear, make_linear
from diptych.engine.backends.cpu.workspace import Workspace
from diptych.engine.model.config import ModelConfig
from diptych.engine.model.layer_config import Activation
from diptych.engine.model.parts import LayerOps, Linear, Rotation

_ITEM_SIZE = 1 << 11  # numbers
_PROVEN_SIZE = 40  # of a product's gates
_SERIAL_SIZE = 1 << 15  # numbers; below, starting threads costs more than they do


class CompiledLayerOps:
    """Of one model, run at once. Implements ``LayerOps``."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._eps = torch.tensor([config.rms_norm_eps], dtype=torch.float32)
        self._ones = torch.ones(config.head_dim)

    def multiply(self, linear: Linear, x: Tensor, out: Tensor | None = None) -> Tensor:
        return linear(x, out)

    def norm(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        self._do(layer_loops.norm.call(*_split(x), *x.shape, x, weight, self._eps, out), x)

    def add_norm(
        self, x: Tensor, y: Tensor, y_weight: Tensor | None, weight: Tensor | None, out: Tensor
    ) -> None:
        weights = (0 if w is None else w for w in (y_weight, weight))
        call = layer_loops.add_norm.call(*_split(x), *x.shape, x, y, *weights, self._eps, out)
        self._do(call, x)

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
        call = layer_loops.rotate.call(
            *_split(qkv),
            len(qkv),
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            qkv,
            *rotation,
            self._ones if q_weight is None else q_weight,
            self._ones if k_weight is None else k_weight,
            q_weight is not None,
            self._eps,
            q,
            kv,
        )
        self._do(call, qkv)

    def gate(self, gate_up: Tensor, out: Tensor) -> None:
        is_gelu = self._config.activation is Activation.GELU_TANH
        call = layer_loops.gate.call(*_split(gate_up), *out.shape, is_gelu, gate_up, out)
        self._do(call, gate_up)

    def multiply_gated(self, linear: Linear, x: Tensor, gate_up: Tensor, out: Tensor) -> None:
        if isinstance(linear, GatingLinear) and linear.can_gate(len(x)):
            linear.gated(x, self._config.activation, out)
            return
        self.multiply(linear, x, gate_up)
        self.gate(gate_up, out)

    def _do(self, call: Call, x: Tensor) -> None:
        """x: what the call goes over."""
        call.run(1 if x.numel() < _SERIAL_SIZE else torch.get_num_threads())


class WrittenLayerOps(CompiledLayerOps):
    """Operations that are written down, to be run later. Linear layers must be compiled ones."""

    def __init__(self, config: ModelConfig, workspace: Workspace) -> None:
        """workspace: for what lies within an operation."""
        super().__init__(config)
        self.calls: list[Call] = []
        self._workspace = workspace

    def multiply(self, linear: Linear, x: Tensor, out: Tensor | None = None) -> Tensor:
        assert isinstance(linear, CompiledLinear)
        assert out is not None, "a program has all of its memory before it runs"
        self.calls.extend(linear.calls(x, out, self._workspace))
        return out

    def _do(self, call: Call, x: Tensor) -> None:
        self.calls.append(call)


def _split(x: Tensor) -> tuple[int, int]:
    """Items of x's rows, and rows in each."""
    num_rows, size = x.shape
    rows_per_item = max(1, _ITEM_SIZE // size)
    return -(-num_rows // rows_per_item), rows_per_item


@torch.inference_mode()
def agree(ops: LayerOps, others: LayerOps, config: ModelConfig) -> bool:
    """Whether two implementations give the same results on a few rows, and on many."""
    return all(
        torch.allclose(got, want, rtol=1e-4, atol=1e-4)
        for num_rows in (3, 300)
        for got, want in zip(
            _results(ops, config, num_rows), _results(others, config, num_rows), strict=True
        )
    )


def _results(ops: LayerOps, config: ModelConfig, num_rows: int) -> list[Tensor]:
    head_dim, hidden, inner = config.head_dim, config.hidden_size, config.intermediate_size
    num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
    weight, head_weight = torch.linspace(0.5, 2, hidden), torch.linspace(0.5, 2, head_dim)
    widest = max(hidden, (num_heads + 2 * num_kv_heads) * head_dim, 2 * inner)
    numbers = torch.arange(float(num_rows * widest)).sin_().mul_(4)

    def rows(size: int) -> Tensor:
        return numbers[: num_rows * size].clone().view(num_rows, size)

    plain, normed, norm, summed = (rows(hidden) for _ in range(4))
    ops.norm(rows(hidden), weight, norm)
    ops.add_norm(plain, rows(hidden), None, None, torch.empty(0))
    ops.add_norm(normed, rows(hidden), weight, weight, summed)
    rotation = Rotation.at(torch.arange(num_rows), torch.linspace(1, 0, head_dim // 2))
    rotated = []
    for w in (None, head_weight):
        q = torch.empty(num_rows, num_heads, head_dim)
        kv = torch.empty(num_rows, 2, num_kv_heads, head_dim)
        ops.rotate(rows((num_heads + 2 * num_kv_heads) * head_dim), rotation, w, w, q, kv)
        rotated += [q, kv]
    gated = torch.empty(num_rows, inner)
    ops.gate(rows(2 * inner), gated)
    multiplied = torch.empty(num_rows, _PROVEN_SIZE)
    of_gates = torch.arange(2.0 * _PROVEN_SIZE * hidden).cos_().view(-1, hidden) / hidden
    linear = make_linear(of_gates, None)
    ops.multiply_gated(linear, rows(hidden), multiplied.repeat(1, 2), multiplied)
    return [plain, normed, norm, summed, *rotated, gated, multiplied]
