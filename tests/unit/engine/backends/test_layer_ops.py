"""Row-wise operations equal their definitions in float64, compiled or not."""

import threading
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from diptych.engine.backends.cpu import backend
from diptych.engine.backends.cpu.layer_ops import CompiledLayerOps
from diptych.engine.backends.cpu.linear import make_linear
from diptych.engine.backends.torch.layer_ops import TorchLayerOps
from diptych.engine.model.config import ModelConfig
from diptych.engine.model.layer_config import Activation
from diptych.engine.model.parts import LayerOps, Rotation
from tests.engines import CPU
from tests.tiny_model import write_tiny_model

ROWS = (1, 3, 700)  # the last is shared among threads
TOLERANCE = 3e-6  # of a result's magnitude


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = write_tiny_model(tmp_path_factory.mktemp("model"), request.param)
    return ModelConfig.from_folder(folder)


@pytest.fixture(params=["compiled", "torch"])
def ops(request: pytest.FixtureRequest, config: ModelConfig) -> LayerOps:
    if request.param == "torch":
        return TorchLayerOps(config, torch.float32)
    return CompiledLayerOps(config)


def rows(seed: int, *shape: int, spread: float = 3.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread


def norm(ops: LayerOps, x: Tensor, weight: Tensor) -> Tensor:
    out = torch.full_like(x, torch.nan)
    ops.norm(x, weight, out)
    return out


def gate(ops: LayerOps, gate_up: Tensor) -> Tensor:
    out = gate_up.new_full((len(gate_up), gate_up.shape[1] // 2), torch.nan)
    ops.gate(gate_up, out)
    return out


def normed(x: Tensor, weight: Tensor, config: ModelConfig) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weight.double()


def assert_close(got: Tensor, want: Tensor, size: Tensor | None = None) -> None:
    assert got.shape == want.shape
    size = want if size is None else size
    assert ((got.double() - want).abs() <= TOLERANCE * (1 + size.abs())).all()


@pytest.mark.parametrize("num_rows", ROWS)
def test_norms_and_sums(ops: LayerOps, config: ModelConfig, num_rows: int) -> None:
    size = config.hidden_size
    x, y = rows(1, num_rows, size), rows(2, num_rows, size)
    weight, y_weight = rows(3, size), rows(4, size)
    assert_close(norm(ops, x, weight), normed(x, weight, config))
    for w in (None, y_weight):
        want = x.double() + (y.double() if w is None else normed(y, w, config))
        total, out = x.clone(), y.clone()
        ops.add_norm(total, y, w, None, out)
        assert_close(total, want)
        total = x.clone()
        ops.add_norm(total, out, w, weight, out)  # y and out may be one
        assert_close(out, normed(want, weight, config))
        assert_close(total, want)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("has_norm", [False, True])
def test_rotate(ops: LayerOps, config: ModelConfig, num_rows: int, has_norm: bool) -> None:
    num_heads, num_kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    qkv = rows(1, num_rows, (num_heads + 2 * num_kv_heads) * head_dim)
    frequencies = 1 / 100.0 ** torch.linspace(0, 1, head_dim // 2)
    positions = torch.arange(num_rows) * 3 % 500
    q_weight, k_weight = (rows(seed, head_dim) if has_norm else None for seed in (5, 6))
    rotation = Rotation.at(positions, frequencies)
    q = torch.full((num_rows, num_heads, head_dim), torch.nan)
    kv = torch.full((num_rows, 2, num_kv_heads, head_dim), torch.nan)
    ops.rotate(qkv, rotation, q_weight, k_weight, q, kv)

    heads = qkv.view(num_rows, -1, head_dim).double()
    want_q, want_k = heads[:, :num_heads], heads[:, num_heads : num_heads + num_kv_heads]
    if q_weight is not None and k_weight is not None:
        want_q, want_k = normed(want_q, q_weight, config), normed(want_k, k_weight, config)
    turn = torch.complex(rotation.cos.double(), rotation.sin.double())[:, None]

    def turned(x: Tensor) -> Tensor:
        product = torch.complex(*x.chunk(2, -1)) * turn
        return torch.cat((product.real, product.imag), -1)

    assert_close(q, turned(want_q))
    assert_close(kv[:, 0], turned(want_k))
    assert torch.equal(kv[:, 1].double(), heads[:, num_heads + num_kv_heads :])


@pytest.mark.parametrize("num_rows", ROWS)
def test_gate(ops: LayerOps, config: ModelConfig, num_rows: int) -> None:
    gate_up = rows(1, num_rows, 2 * config.intermediate_size, spread=20.0)
    gate_up[0, :4] = torch.tensor([-2000.0, 2000.0, 0.0, -87.5])
    gated, up = gate_up.double().chunk(2, -1)
    if config.activation is Activation.SILU:
        want = gated / (1 + (-gated).exp()) * up
    else:
        want = torch.nn.functional.gelu(gated, approximate="tanh") * up
    # torch's 1 + tanh cancels, so its error is relative to the product without the gate.
    size = gated * up if isinstance(ops, TorchLayerOps) else want
    assert_close(gate(ops, gate_up), want, size)


@pytest.mark.parametrize("num_rows", ROWS)
def test_a_product_is_gated(ops: LayerOps, config: ModelConfig, num_rows: int) -> None:
    size, hidden = config.intermediate_size, config.hidden_size
    linear = make_linear(rows(1, 2 * size, hidden) / hidden**0.5, rows(2, 2 * size))
    x, gated = rows(3, num_rows, hidden), torch.full((num_rows, size), torch.nan)
    ops.multiply_gated(linear, x, torch.empty(num_rows, 2 * size), gated)
    gates, up = linear(x).double().chunk(2, -1)
    act = torch.nn.functional.silu
    if config.activation is Activation.GELU_TANH:
        act = partial(torch.nn.functional.gelu, approximate="tanh")
    assert_close(gated, act(gates) * up, gates * up)


def test_rows_do_not_influence_each_other(ops: LayerOps, config: ModelConfig) -> None:
    gate_up = rows(1, 700, 2 * config.intermediate_size)
    x, weight = rows(2, 700, config.hidden_size), rows(3, config.hidden_size)
    want = [gate(ops, gate_up[5:6]), norm(ops, x[5:6], weight)]
    gate_up[4], x[4] = float("nan"), float("nan")
    gate_up[6], x[6] = float("inf"), float("inf")
    got = [gate(ops, gate_up), norm(ops, x, weight)]
    for whole, alone in zip(got, want, strict=True):
        assert_close(whole[5:6], alone.double())
        assert whole[4].isnan().all()


def test_exponent() -> None:
    from diptych.engine.backends.cpu.kernels.exponent import exp

    for x in torch.linspace(-87, 88, 20_001).tolist():
        assert exp(np.float32(x)) == pytest.approx(
            torch.tensor(min(x, 87.0)).double().exp().item(), rel=3e-7
        )
    assert exp(np.float32(-1e30)) == pytest.approx(1.6e-38, rel=0.1)
    assert np.isnan(exp(np.float32("nan")))


def test_a_loop_does_every_item_once_on_any_number_of_threads() -> None:
    from diptych.engine.backends.cpu.kernels.layer_loops import add_norm

    eps, weight, y = torch.tensor([1e-6]), torch.ones(8), torch.ones(1000, 8)

    def check(num_threads: int) -> None:
        for rows_per_item in (1, 7, 1000):
            x, out = torch.zeros(1000, 8), torch.zeros(1000, 8)
            num_items = -(-1000 // rows_per_item)
            add_norm(num_items, num_threads, rows_per_item, 1000, 8, x, y, 0, weight, eps, out)
            assert torch.equal(x, y), "an item was done twice, or not at all"

    threads = [threading.Thread(target=check, args=(count,)) for count in (1, 2, 2, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check(2)


def test_without_numba_torch_does_it(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(CPU.layer_ops(config, torch.float32), CompiledLayerOps)
    assert isinstance(CPU.layer_ops(config, torch.bfloat16), TorchLayerOps)
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    assert isinstance(CPU.layer_ops(config, torch.float32), TorchLayerOps)


def test_wrong_loops_are_not_used(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(self: CompiledLayerOps, gate_up: Tensor, out: Tensor) -> None:
        out.copy_(gate_up[:, : gate_up.shape[1] // 2])

    monkeypatch.setattr(CompiledLayerOps, "gate", nothing)
    assert isinstance(CPU.layer_ops(config, torch.float32), TorchLayerOps)


@pytest.mark.parametrize("num_rows", ROWS)
def test_bfloat16(config: ModelConfig, num_rows: int) -> None:
    ops = TorchLayerOps(config, torch.bfloat16)
    x, weight = rows(1, num_rows, config.hidden_size).bfloat16(), rows(3, config.hidden_size)
    out = norm(ops, x, weight)
    assert out.dtype is torch.bfloat16
    assert ((out.double() - normed(x, weight, config)).abs() <= 0.02 * (1 + out.abs())).all()
