"""Float32 products of many rows in vector registers, where there is no matrix unit."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from diptych.engine.backends.cpu import linear
from diptych.engine.backends.cpu.kernels import matrix_unit, wide_matmul
from diptych.engine.backends.cpu.linear import MAX_THIN_ROWS, SplitLinear, WideLinear, make_linear
from diptych.engine.model.layer_config import Activation
from tests.integration.linear.checks import (
    check_as_exact_as_torch,
    check_equal_bits,
    mixed_rows,
    random,
)

pytestmark = pytest.mark.skipif(not wide_matmul.SUPPORTED, reason="needs AVX-512, or AVX2 and FMA")

# columns, inner: one panel; the last panel does some columns again; more inner than a span;
# more panels than a thread keeps at once; panels that are kept in parts; and rows of x that would
# push each other out of the cache
SHAPES = [(32, 16), (70, 64), (131, 576), (960, 160), (2100, 272), (70, 1408), (70, 1024)]


@pytest.fixture
def no_matrix_unit(fresh_proofs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_unit, "is_lent", lambda: False)


@pytest.mark.parametrize("num_rows", [MAX_THIN_ROWS + 1, 99, 113, 300])
def test_as_exact_as_torch(num_rows: int, num_threads: int) -> None:
    check_as_exact_as_torch(WideLinear, SHAPES, num_rows)


def test_a_few_rows_take_the_same_memory_too() -> None:
    made, out = WideLinear(random(70, 64)), torch.full((1, 70), torch.nan)
    assert made(random(1, 64), out) is out


@pytest.mark.parametrize("in_features", [576, 1024])
def test_rows_do_not_depend_on_their_neighbours(in_features: int, num_threads: int) -> None:
    made = WideLinear(random(131, in_features), random(131))
    x = mixed_rows(300, in_features)
    whole = made(x)
    assert torch.equal(whole[3], random(131))
    for num_rows in range(wide_matmul.MIN_ROWS, 130):
        check_equal_bits(made(x[:num_rows]), whole[:num_rows])
        check_equal_bits(made(x[-num_rows:]), whole[-num_rows:])


@pytest.mark.parametrize("activation", Activation)
def test_gates_as_it_multiplies(activation: Activation, num_threads: int) -> None:
    # The last panel does some columns again; parts.
    for size, in_features in ((16, 16), (70, 576), (300, 64), (19, 1408)):
        weight, bias = random(2 * size, in_features) / in_features**0.5, random(2 * size)
        made, x = WideLinear(weight, bias), random(113, in_features)
        out = torch.full((113, size), torch.nan)
        made.gated(x, activation, out)
        gate, up = made(x).double().chunk(2, 1)
        gate = F.silu(gate) if activation is Activation.SILU else F.gelu(gate, approximate="tanh")
        torch.testing.assert_close(out.double(), gate * up, rtol=2e-6, atol=1e-7)
        few = torch.empty(wide_matmul.MIN_ROWS, size)
        made.gated(x[-len(few) :], activation, few)
        check_equal_bits(few, out[-len(few) :])


@pytest.mark.usefixtures("no_matrix_unit")
def test_which_linear_is_made_for_many_rows() -> None:
    assert linear.wide_works()
    assert not linear.split_works()
    weight, x = random(70, 64), random(MAX_THIN_ROWS + 1, 64)
    assert torch.equal(make_linear(weight)(x), WideLinear(weight)(x))
    assert torch.equal(make_linear(weight)(x.t().contiguous().t()), WideLinear(weight)(x))
    assert torch.equal(WideLinear(weight)(x[:5]), F.linear(x[:5], weight))
    assert WideLinear(weight)(x[:0]).shape == (0, 70)
    with pytest.raises(ValueError, match="no matrix unit"):
        SplitLinear(weight)
    for wrong in (random(wide_matmul.PANEL - 1, 64), random(70, 65)):
        with pytest.raises(ValueError, match="this weight"):
            WideLinear(wrong)
        odd = random(MAX_THIN_ROWS + 1, wrong.shape[1])
        assert torch.equal(make_linear(wrong)(odd), F.linear(odd, wrong))


@pytest.mark.usefixtures("no_matrix_unit")
def test_a_kernel_that_is_wrong_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Wrong(WideLinear):
        def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
            return super().__call__(x, out) * (1 + 1e-5)

    monkeypatch.setattr(linear, "WideLinear", Wrong)
    weight, x = random(70, 64), random(MAX_THIN_ROWS + 1, 64)
    assert torch.equal(make_linear(weight)(x), F.linear(x, weight))
    assert "not usable" in caplog.text
