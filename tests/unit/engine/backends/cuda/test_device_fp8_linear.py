"""Interpreted products of 8-bit floats, against their definition; rounding, bit for bit."""

from tests.triton_interpreter import INTERPRETED

# isort: split
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diptych.engine.backends.cuda.fp8_linear import DeviceFp8Linear, DeviceFp8Weights, round_rows
from diptych.engine.backends.torch import fp8_linear
from diptych.engine.backends.torch.fp8_linear import PlainFp8Linear, Rounded, works
from diptych.errors import ConfigurationError

HOST = torch.device("cpu")
STORE = DeviceFp8Weights(HOST, torch.float32, num_processors=8)

pytestmark = pytest.mark.skipif(
    not works(HOST, torch.float32), reason="this torch has no product of 8-bit floats on a CPU"
)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 16, 333])
def test_rows_are_rounded_to_the_same_bits_in_one_launch(size: int, dtype: torch.dtype) -> None:
    """Zeros, tiny ones, and what is no number too."""
    rows = (random(60, size) * torch.logspace(-36, 36, 60)[:, None]).to(dtype)
    rows[9] = 0.0
    rows[7, -1], rows[3, 0], rows[5, size // 2] = -torch.inf, torch.nan, torch.inf
    got, want = round_rows(rows), fp8_linear.round_rows(rows)
    torch.testing.assert_close(got.scales, want.scales, rtol=0, atol=0, equal_nan=True)
    is_finite = want.scales[:, 0].isfinite()
    assert is_finite.sum() == 57
    for part, wanted in ((got.numbers[:, :size], want.numbers), (got.numbers[:, size:], None)):
        bits = part[is_finite].view(torch.uint8) & (255 if wanted is not None else 127)
        zeros = torch.zeros_like(bits)
        assert torch.equal(bits, zeros if wanted is None else wanted[is_finite].view(torch.uint8))


@settings(deadline=None, max_examples=30)
@given(
    num_rows=st.one_of(st.integers(0, 3), st.integers(4, 80)),
    num_outputs=st.integers(1, 140),
    num_inputs=st.one_of(st.integers(1, 300), st.sampled_from((512, 1024, 2100))),
    has_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_products(
    num_rows: int, num_outputs: int, num_inputs: int, has_bias: bool, seed: int
) -> None:
    """Most are no multiples of tiles; what is not finite stays in its row, behind the end too."""
    weight = STORE.rounded(random(num_outputs, num_inputs, seed=seed))
    bias = random(num_outputs, seed=1) if has_bias else None
    linear = STORE.linear(weight, bias)
    assert isinstance(linear, DeviceFp8Linear)
    x = torch.full((num_rows + 1, num_inputs), torch.nan)[:num_rows]
    x.copy_(random(num_rows, num_inputs, seed=seed + 1))
    out = torch.full((num_rows + 1, num_outputs), torch.nan)
    y = out[:num_rows]
    assert linear(x, y) is y
    torch.testing.assert_close(y, PlainFp8Linear(weight, bias)(x), rtol=1e-4, atol=1e-4)
    assert bool(out[num_rows].isnan().all())
    if num_rows > 1:
        x[num_rows // 2, 0] = torch.nan
        again = linear(x)
        assert bool(again[num_rows // 2].isnan().all())
        others = torch.arange(num_rows) != num_rows // 2
        assert torch.equal(again[others], y[others])


def test_a_row_has_the_same_bits_in_any_batch_of_some() -> None:
    """Inputs in parts, as processors are left over."""
    linear = STORE.linear(STORE.rounded(random(40, 4096)), random(40, seed=1))
    x = random(64, 4096, seed=2)
    for rows, most in ((slice(3, 5), 16), (slice(2, 15), 16), (slice(1, 19), 64)):
        assert torch.equal(linear(x[:most])[rows], linear(x[rows]))


def test_a_device_takes_weights_so() -> None:
    linear = INTERPRETED.weights(torch.float32, "fp8").linear(random(30, 50), None)
    assert isinstance(linear, DeviceFp8Linear)
    assert (linear.out_features, linear.in_features) == (30, 50)


def test_a_device_that_multiplies_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of rows that it does so for; and one that cannot is told by name."""
    STORE.check()
    multiplied = DeviceFp8Linear.multiply_rounded
    for wrong in (1, 16, 64, 65):

        def otherwise(
            self: DeviceFp8Linear, rows: Rounded, out: Tensor, wrong: int = wrong
        ) -> None:
            multiplied(self, rows, out)
            out.mul_(1.0 + 0.1 * (len(out) == wrong))

        monkeypatch.setattr(DeviceFp8Linear, "multiply_rounded", otherwise)
        with pytest.raises(ConfigurationError, match=f"of {wrong} rows"):
            STORE.check()

    def missing(*_: object) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(DeviceFp8Linear, "multiply_rounded", missing)
    with pytest.raises(ConfigurationError, match="no such instruction"):
        STORE.check()
