"""Float32 products of many rows in vector registers, where there is no matrix unit."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from diptych.engine.backends.cpu import linear
from diptych.engine.backends.cpu.kernels import matrix_unit, wide_matmul
from diptych.engine.backends.cpu.linear import MAX_THIN_ROWS, SplitLinear, WideLinear, make_linear

pytestmark = pytest.mark.skipif(not wide_matmul.SUPPORTED, reason="needs AVX-512, or AVX2 and FMA")

# columns, inner: one panel; the last panel does some columns again; more inner than a span;
# more panels than a thread keeps at once
SHAPES = [(32, 16), (70, 64), (131, 576), (960, 160), (2100, 272)]


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def no_matrix_unit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(matrix_unit, "is_lent", lambda: False)
    proofs = (linear.split_works, linear.wide_works)
    for proof in proofs:
        proof.cache_clear()
    yield
    for proof in proofs:
        proof.cache_clear()


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("num_rows", [MAX_THIN_ROWS + 1, 99, 113, 300])
def test_as_exact_as_torch(num_rows: int, num_threads: int) -> None:
    for out_features, in_features in SHAPES:
        weight, bias = random(out_features, in_features), random(out_features)
        x = random(num_rows, in_features)
        size = x.double().abs() @ weight.double().abs().t()
        for given in (bias, None):
            want = F.linear(x.double(), weight.double(), None if given is None else given.double())
            made = WideLinear(weight, given)
            assert (made.out_features, made.in_features) == (out_features, in_features)
            out = torch.full((num_rows, out_features), torch.nan)
            assert made(x, out) is out
            assert torch.equal(out, made(x))
            assert made(x[:1], out[:1]).data_ptr() == out.data_ptr()
            error = (made(x).double() - want).abs()
            assert (error / (size + bias.double().abs())).max() < 4 * torch.finfo().eps
            of_torch = (F.linear(x, weight, given).double() - want).abs()
            assert error.square().mean() < 2 * of_torch.square().mean()


def test_rows_do_not_depend_on_their_neighbours(num_threads: int) -> None:
    made = WideLinear(random(131, 576), random(131))
    x = random(300, 576)
    x[1] *= 1e30
    x[2] = torch.inf
    x[3] = 0
    whole = made(x)
    assert torch.equal(whole[3], random(131))
    for num_rows in range(wide_matmul.MIN_ROWS, 130):
        torch.testing.assert_close(
            made(x[:num_rows]), whole[:num_rows], rtol=0, atol=0, equal_nan=True
        )
        torch.testing.assert_close(
            made(x[-num_rows:]), whole[-num_rows:], rtol=0, atol=0, equal_nan=True
        )


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
