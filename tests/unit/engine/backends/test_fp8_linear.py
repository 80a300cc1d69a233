"""Layers in 8-bit floats: what is rounded how, and torch's product against its definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diptych.engine.backends.torch import fp8_linear
from diptych.engine.backends.torch.fp8_linear import (
    Fp8Weights,
    PlainFp8Linear,
    ScaledFp8Linear,
    round_rows,
    works,
)
from diptych.errors import ConfigurationError
from tests.engines import CPU, PLAIN

HOST = torch.device("cpu")
STORE = Fp8Weights(HOST, torch.float32)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_error_is_a_sixteenth_of_a_number_at_most() -> None:
    rows = random(40, 333) * torch.logspace(-20, 20, 40)[:, None]
    numbers, scales = round_rows(rows)
    assert numbers.float().abs().amax(1).eq(fp8_linear.LARGEST).all()
    error = (numbers.double() * scales.double() - rows).abs()
    assert bool((error <= torch.maximum(rows.abs() / 16, scales / 1024)).all())


def test_zero_tiny_and_broken_rows() -> None:
    rows = torch.tensor([[0.0, 0.0], [1e-38, -1e-38], [1.0, torch.inf], [torch.nan, 1.0]])
    y = PlainFp8Linear(STORE.rounded(random(5, 2)))(rows)
    assert torch.equal(y[:2], torch.zeros(2, 5))
    assert bool(y[2:].isnan().all()), "what is no number must stay visible"
    with pytest.raises(ConfigurationError, match="not a finite number"):
        STORE.linear(STORE.rounded(rows), None)


@settings(deadline=None, max_examples=30)
@given(
    num_rows=st.integers(0, 40),
    num_outputs=st.integers(1, 80),  # most are no multiples of what torch takes
    num_inputs=st.integers(1, 80),
    has_bias=st.booleans(),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    seed=st.integers(0, 99),
)
def test_products(
    num_rows: int, num_outputs: int, num_inputs: int, has_bias: bool, dtype: torch.dtype, seed: int
) -> None:
    if not works(HOST, dtype):
        pytest.skip("this torch has no product of 8-bit floats on a CPU")
    weight = STORE.rounded(random(num_outputs, num_inputs, seed=seed))
    bias = random(num_outputs, seed=1).to(dtype) if has_bias else None
    x = random(num_rows, num_inputs, seed=seed + 1).to(dtype)
    rows = round_rows(x)
    inputs, exact = rows.numbers.double() * rows.scales, weight.numbers.double()
    want = inputs @ (exact * weight.scales).T + (0 if bias is None else bias.double())
    added = want.abs() + inputs.abs() @ (exact * weight.scales).abs().T
    for linear in (PlainFp8Linear(weight, bias), ScaledFp8Linear(weight, bias)):
        out = torch.full((num_rows, linear.out_features), torch.nan, dtype=dtype)
        assert linear(x, out) is out
        # Of sums in any order: by what is added, of which little may be left.
        error = (out - want).abs()
        assert bool((error <= 4 * torch.finfo(dtype).eps * (1 + added)).all())
        assert torch.equal(linear(x), out)
        assert linear(x).is_contiguous()


def test_a_row_is_rounded_by_itself() -> None:
    linear = STORE.linear(STORE.rounded(random(32, 64)), None)
    x = random(9, 64, seed=1)
    alone = linear(x[3:4])
    x[5] *= 1e4
    torch.testing.assert_close(linear(x)[3:4], alone, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(30, 32), (32, 30)])
def test_shapes_that_torch_does_not_take_are_no_slower(shape: tuple[int, int]) -> None:
    """A head's rows are as many as a vocabulary has entries."""
    if not works(HOST, torch.float32):
        pytest.skip("this torch has no product of 8-bit floats on a CPU")
    linear = STORE.linear(STORE.rounded(random(*shape)), None)
    assert isinstance(linear, ScaledFp8Linear)
    assert (linear.out_features, linear.in_features) == shape


def test_a_torch_without_such_products(monkeypatch: pytest.MonkeyPatch) -> None:
    works.cache_clear()
    monkeypatch.setattr(torch, "_scaled_mm", None)
    weight = random(32, 32)
    for backend in (CPU, PLAIN):
        linear = backend.weights(torch.float32, "fp8").linear(weight, None)
        assert isinstance(linear, PlainFp8Linear)
    works.cache_clear()
