"""Linear layers: right for every shape, the same bits in every batch, and with a way out."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from diptych.engine.backends.cpu import linear
from diptych.engine.backends.cpu.huge_pages import HugePages
from diptych.engine.backends.cpu.kernels import loop, matrix_unit
from diptych.engine.backends.cpu.linear import (
    MAX_THIN_ROWS,
    PackedLinear,
    SplitLinear,
    ThinLinear,
    make_linear,
)
from diptych.engine.backends.torch.linear import PlainLinear
from tests.integration.linear.checks import (
    check_as_exact_as_torch,
    check_equal_bits,
    mixed_rows,
    random,
)

SHAPES = [(4, 1), (5, 15), (70, 50), (65, 16), (131, 577)]  # out_features, in_features
SPLIT_SHAPES = [(32, 32), (33, 64), (131, 576), (2100, 96), (640, 2048)]


@pytest.fixture
def matrix_unit_here() -> None:
    if not matrix_unit.is_lent():
        pytest.skip("this machine lends no matrix unit")
    assert linear.split_works()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 6, 7, 13, 16, 31, 70, MAX_THIN_ROWS + 1])
def test_linear_equals_torch(dtype: torch.dtype, num_rows: int, num_threads: int) -> None:
    for out_features, in_features in SHAPES:
        weight = random(out_features, in_features).to(dtype)
        bias = random(out_features).to(dtype)
        x = random(num_rows, in_features).to(dtype)
        size = x.double().abs() @ weight.double().abs().t()  # of what is summed
        for given in (bias, None):
            want = F.linear(x.double(), weight.double(), None if given is None else given.double())
            for made in (make_linear(weight, given), PlainLinear(weight, given)):
                assert (made.out_features, made.in_features) == (out_features, in_features)
                got = made(x)
                assert got.dtype is dtype
                given_out = torch.full_like(got, torch.nan)
                assert made(x, given_out) is given_out
                assert torch.equal(given_out, got)
                error = (got.double() - want).abs() / (size + bias.double().abs())
                assert error.max() < 4 * torch.finfo(dtype).eps


def test_which_linear_is_made() -> None:
    assert linear.thin_works()
    assert isinstance(make_linear(random(70, 50)), ThinLinear)
    assert not isinstance(make_linear(random(3, 50)), ThinLinear)  # too few columns
    assert not isinstance(make_linear(random(70, 50).bfloat16()), ThinLinear)


def test_rows_do_not_depend_on_their_neighbours(num_threads: int) -> None:
    made = ThinLinear(random(131, 577), random(131))
    x = mixed_rows(MAX_THIN_ROWS, 577)
    alone = torch.cat([made(row[None]) for row in x])
    for num_rows in (1, 2, 5, 6, 7, 8, 16, 33, MAX_THIN_ROWS):
        check_equal_bits(made(x[:num_rows]), alone[:num_rows])


@pytest.mark.usefixtures("matrix_unit_here")
@pytest.mark.parametrize("num_rows", [1, 16, 31, 32, 33, MAX_THIN_ROWS + 1, 300])
def test_products_of_parts_are_as_exact_as_float32(num_rows: int, num_threads: int) -> None:
    check_as_exact_as_torch(SplitLinear, SPLIT_SHAPES, num_rows)


@pytest.mark.usefixtures("matrix_unit_here")
def test_rows_of_products_of_parts_do_not_depend_on_their_neighbours(num_threads: int) -> None:
    made = SplitLinear(random(131, 576), random(131))
    x = mixed_rows(70, 576)
    alone = torch.cat([made(row[None]) for row in x])
    assert torch.equal(alone[3], random(131))
    for num_rows in (1, 2, 16, 17, 33, 70):
        check_equal_bits(made(x[:num_rows]), alone[:num_rows])


@pytest.mark.usefixtures("matrix_unit_here")
def test_which_linear_is_made_for_many_rows() -> None:
    weight, x = random(70, 64), random(MAX_THIN_ROWS + 1, 64)
    assert torch.equal(make_linear(weight)(x), SplitLinear(weight)(x))
    assert torch.equal(make_linear(weight)(x.t().contiguous().t()), SplitLinear(weight)(x))
    assert SplitLinear(weight)(x[:0]).shape == (0, 70)
    for wrong in (random(31, 64), random(70, 65)):
        with pytest.raises(ValueError, match="this weight"):
            SplitLinear(wrong)


@pytest.mark.usefixtures("fresh_proofs", "matrix_unit_here")
def test_many_rows_where_products_of_parts_are_wrong(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Wrong(SplitLinear):
        def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
            return super().__call__(x, out) * (1 + 1e-5)

    linear.split_works.cache_clear()
    monkeypatch.setattr(linear, "SplitLinear", Wrong)
    weight, x = random(70, 64), random(MAX_THIN_ROWS + 1, 64)
    assert torch.equal(make_linear(weight)(x), linear.WideLinear(weight)(x))
    assert "not usable" in caplog.text


def test_input_that_is_not_contiguous() -> None:
    made = ThinLinear(random(50, 70).t(), random(140)[::2])
    x = random(9, 100)[:, 10:60]
    torch.testing.assert_close(made(x), F.linear(x, random(50, 70).t(), random(140)[::2]))
    torch.testing.assert_close(made(x[::2]), made(x)[::2], rtol=0, atol=0)
    assert made(x[:0]).shape == (0, 70)


@pytest.mark.usefixtures("fresh_proofs")
def test_falls_back_where_the_kernel_is_wrong(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Wrong(ThinLinear):
        def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
            return super().__call__(x, out) * 1.01

    monkeypatch.setattr(linear, "ThinLinear", Wrong)
    assert isinstance(make_linear(torch.zeros(4, 4)), PackedLinear)
    assert "not usable" in caplog.text


@pytest.mark.usefixtures("fresh_proofs")
def test_falls_back_where_threads_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "has_team", lambda: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert isinstance(make_linear(torch.zeros(4, 4)), PackedLinear)


@pytest.mark.usefixtures("fresh_proofs")
def test_falls_back_where_packing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(PackedLinear):
        def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
            return super().__call__(x, out) * 1.2

    class Missing(PackedLinear):
        def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
            raise AttributeError("no such operator")

    for replacement in (Broken, Missing):
        linear.packing_works.cache_clear()
        monkeypatch.setattr(linear, "PackedLinear", replacement)
        assert isinstance(make_linear(torch.zeros(4, 4).bfloat16()), PlainLinear)


@pytest.mark.parametrize(
    ("features", "made"), [("+avx,+avx2,+fma", "ThinLinear"), ("+sse2", "PackedLinear")]
)
def test_on_smaller_processors(features: str, made: str) -> None:
    """Compiled for another processor than this one, in a process of its own."""
    program = (
        "import torch; from diptych.engine.backends.cpu.linear import make_linear;"
        "w, x = torch.randn(131, 576), torch.randn(130, 576); made = make_linear(w);"
        "torch.testing.assert_close(made(x), x @ w.T, rtol=1e-4, atol=1e-4);"
        "torch.testing.assert_close(made(x[:70]), x[:70] @ w.T, rtol=1e-4, atol=1e-4);"
        "print(type(made).__name__)"
    )
    variables = {"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": features}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == made


def test_huge_pages_keep_what_is_written_to_them() -> None:
    pages = HugePages()
    sources = [random(100, 33), random(7).bfloat16(), random(5000, 4000), random(64, 64).t()]
    placed = [
        pages.empty(source.nbytes).view(source.dtype).view(source.shape).copy_(source)
        for source in sources
    ]
    for source, tensor in zip(sources, placed, strict=True):
        assert torch.equal(source, tensor)
        assert tensor.is_contiguous()
        assert tensor.dtype is source.dtype
        assert tensor.data_ptr() % 64 == 0


@pytest.mark.parametrize("num_rows", [1, 3, 16, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_is_as_exact_as_torch_beside_the_largest_result(
    dtype: torch.dtype, num_rows: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(70, 50, generator=generator).to(dtype)
    bias = torch.randn(70, generator=generator).to(dtype)
    x = torch.randn(num_rows, 50, generator=generator).to(dtype)
    for given in (bias, None):
        want = F.linear(x.double(), weight.double(), None if given is None else given.double())
        for made in (make_linear(weight, given), PlainLinear(weight, given)):
            error = (made(x).double() - want).abs().max() / want.abs().max()
            assert error < 4 * torch.finfo(dtype).eps
