"""Interpreted row-wise kernels against plain torch."""

from tests.triton_interpreter import INTERPRETED

# isort: split
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from diptych.engine.backends.cuda import fp8_linear
from diptych.engine.backends.cuda.fp8_linear import DeviceFp8Linear, round_rows
from diptych.engine.backends.torch.fp8_linear import Rounded
from diptych.engine.backends.torch.layer_ops import TorchLayerOps
from diptych.engine.model.config import ModelConfig
from diptych.engine.model.layer_config import Activation
from diptych.engine.model.parts import LayerOps, Rotation
from tests.attention_config import config_of

NUM_ROWS = 5
SHAPES = [(4, 4, 64), (8, 2, 128), (8, 1, 256), (9, 3, 80)]  # heads, key-value heads, head_dim


def both(config: ModelConfig) -> tuple[LayerOps, LayerOps]:
    return INTERPRETED.layer_ops(config, torch.float32), TorchLayerOps(config, torch.float32)


def rows(seed: int, *shape: int, spread: float = 3.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread


def assert_equal(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("size", [16, 100, 1024, 2560])
def test_norm(size: int) -> None:
    x, weight = rows(1, NUM_ROWS, size), rows(2, size)
    outs = []
    for ops in both(config_of(2, 1, 16, None)):
        outs.append(torch.full_like(x, torch.nan))
        ops.norm(x, weight, outs[-1])
    assert_equal(*outs)


@pytest.mark.parametrize("size", [100, 2560])
@pytest.mark.parametrize("has_weight", [False, True])
@pytest.mark.parametrize("has_y_weight", [False, True])
def test_add_norm(size: int, has_weight: bool, has_y_weight: bool) -> None:
    weight = rows(3, size) if has_weight else None
    y_weight = rows(4, size) if has_y_weight else None
    sums, outs = [], []
    for ops in both(config_of(2, 1, 16, None)):
        x, y = rows(1, NUM_ROWS, size), rows(2, NUM_ROWS, size)
        ops.add_norm(x, y, y_weight, weight, y)  # y and out are one, as a layer has it
        sums.append(x)
        outs.append(y)
    assert_equal(*sums)
    assert_equal(*outs)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("has_norms", [False, True])
def test_rotate(shape: tuple[int, int, int], has_norms: bool) -> None:
    num_heads, num_kv_heads, head_dim = shape
    frequencies = 1 / 100.0 ** torch.linspace(0, 1, head_dim // 2)
    rotation = Rotation.at(torch.tensor([0, 1, 77, 5_000, 131_071]), frequencies)
    q_weight, k_weight = (rows(seed, head_dim) if has_norms else None for seed in (5, 6))
    qkv = rows(1, NUM_ROWS, (num_heads + 2 * num_kv_heads) * head_dim)
    queries, keys_and_values = [], []
    for ops in both(config_of(*shape, None)):
        q = torch.full((NUM_ROWS, num_heads, head_dim), torch.nan)
        kv = torch.full((NUM_ROWS, 2, num_kv_heads, head_dim), torch.nan)
        ops.rotate(qkv, rotation, q_weight, k_weight, q, kv)
        queries.append(q)
        keys_and_values.append(kv)
    assert_equal(*queries)
    assert_equal(*keys_and_values)


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("size", [16, 1024, 1500])
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
def test_gate(activation: Activation, size: int) -> None:
    gate_up = rows(1, NUM_ROWS, 2 * size, spread=5.0)
    gate_up[0, :4] = torch.tensor([-2000.0, 2000.0, 0.0, -87.5])
    outs = []
    for ops in both(replace(config_of(2, 1, 16, None), activation=activation)):
        outs.append(torch.full((NUM_ROWS, size), torch.nan))
        ops.gate(gate_up, outs[-1])
    # Plain torch's 1 + tanh cancels: it is as exact as the product without the gate.
    bound = 3e-6 * (1 + (gate_up[:, :size] * gate_up[:, size:]).abs())
    assert bool(((outs[0] - outs[1]).abs() <= bound).all())


@pytest.mark.parametrize("size", [20, 64])
def test_what_is_normed_is_rounded_beside_for_products_of_8_bit_floats(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bits that it is rounded to by itself; and only what was written last."""
    ops, _ = both(config_of(2, 1, 16, None))
    linear = INTERPRETED.weights(torch.float32, "fp8").linear(rows(7, 8, size), None)
    if not isinstance(linear, DeviceFp8Linear):
        pytest.skip("this torch has no product of 8-bit floats on a CPU")
    num_rounded = []

    def counted(x: Tensor) -> Rounded:
        num_rounded.append(len(x))
        return round_rows(x)

    monkeypatch.setattr(fp8_linear, "round_rows", counted)
    x, y, weight = rows(1, NUM_ROWS, size), rows(2, NUM_ROWS, size), rows(3, size)
    gate_up, other = rows(4, NUM_ROWS, 2 * size), rows(5, NUM_ROWS, size)
    out, got = torch.empty(NUM_ROWS, size), torch.empty(NUM_ROWS, 8)
    ops.multiply(linear, x, got)  # the first of them says that there are such products
    assert num_rounded == [NUM_ROWS]
    writes: tuple[Callable[[], None], ...] = (
        lambda: ops.norm(x, weight, out),
        lambda: ops.add_norm(x, y, None, weight, out),
    )
    for write in writes:
        num_rounded.clear()
        write()
        ops.multiply(linear, out, got)
        assert not num_rounded
        assert torch.equal(got, linear(out))
        write()
        for each in (other, out):  # another one, and then once more what was written before
            num_rounded.clear()
            ops.multiply(linear, each, got)
            assert num_rounded == [NUM_ROWS]
            assert torch.equal(got, linear(each))
    writes[0]()
    ops.gate(gate_up, out)
    num_rounded.clear()
    ops.multiply(linear, out, got)
    assert num_rounded == [NUM_ROWS]
    assert torch.equal(got, linear(out))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_rows_do_not_influence_each_other() -> None:
    ops, _ = both(config_of(2, 1, 16, None))
    x, weight = rows(1, 3, 64), rows(2, 64)
    x[0], x[2] = torch.nan, torch.inf
    out, alone = torch.empty_like(x), torch.empty(1, 64)
    ops.norm(x, weight, out)
    ops.norm(x[1:2].clone(), weight, alone)
    assert torch.equal(out[1:2], alone)
    assert bool(out[0].isnan().all())
