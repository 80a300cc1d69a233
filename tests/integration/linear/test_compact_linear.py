"""Linear layers on compact weights have the bits of those on the float32 weights."""

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from diptych.engine.backends.cpu import linear
from diptych.engine.backends.cpu.kernels import matrix_unit
from diptych.engine.backends.cpu.linear import (
    MAX_THIN_ROWS,
    ThinLinear,
    WideLinear,
    compact_works,
    make_linear,
    takes_compact,
)
from diptych.engine.model.compact import CompactWeight, rows_of
from diptych.models.compact import BLOCK_SIZES, HEAD_BYTES, row_bytes
from tests.engines import CPU
from tests.integration.linear.checks import check_equal_bits, mixed_rows, random

# columns, inner: one panel; ends that do some columns again; several spans and blocks of columns;
# panels that are kept in parts
SHAPES = [(32, 32), (70, 64), (131, 576), (960, 160), (2100, 288), (70, 1408)]


def compact(num_rows: int, num_columns: int, block_size: int) -> CompactWeight:
    """The same for the same shape."""
    memory = torch.empty(num_rows, row_bytes(num_columns, block_size), dtype=torch.uint8)
    blocks = memory.view(num_rows, -1, HEAD_BYTES + block_size)
    heads = random(num_rows, blocks.shape[1], 2).half().float()
    heads[0, 0] = torch.tensor([-0.5, -0.0])
    blocks[..., :HEAD_BYTES] = heads.view(torch.uint8)
    generator = torch.Generator().manual_seed(num_rows)
    numbers = torch.randint(-128, 128, blocks[..., HEAD_BYTES:].shape, generator=generator)
    blocks[..., HEAD_BYTES:] = numbers.to(torch.int8).view(torch.uint8)
    return CompactWeight(memory, block_size)


def same_bits(got: Tensor, want: Tensor) -> bool:
    return torch.equal(got.view(torch.int32), want.view(torch.int32))


@pytest.mark.skipif(not compact_works(), reason="needs AVX-512, or AVX2 and FMA")
class TestKernels:
    @pytest.mark.parametrize("block_size", BLOCK_SIZES)
    def test_bits_are_those_of_the_float32_weight(self, block_size: int, num_threads: int) -> None:
        for num_rows, num_columns in SHAPES:
            weight, bias = compact(num_rows, num_columns, block_size), random(num_rows)
            for given in (None, bias):
                ours = make_linear(weight, given)
                plain = make_linear(weight.widened(), given)
                assert isinstance(ours, ThinLinear)
                for num_x in (0, 1, 2, 6, 7, 13, MAX_THIN_ROWS, MAX_THIN_ROWS + 1, 300):
                    x = random(num_x, num_columns)
                    assert same_bits(ours(x), plain(x)), (num_rows, num_columns, num_x)

    def test_many_rows_without_a_matrix_unit(
        self, fresh_proofs: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(matrix_unit, "is_lent", lambda: False)
        assert compact_works()
        weight = compact(131, 576, 16)
        for num_x in (3, MAX_THIN_ROWS + 1, 200):
            x = random(num_x, 576)
            assert same_bits(WideLinear(weight)(x), WideLinear(weight.widened())(x))

    @pytest.mark.parametrize("num_x", [9, 120])
    def test_rows_do_not_depend_on_their_neighbours(self, num_x: int) -> None:
        made = make_linear(compact(70, 64, 32))
        x = mixed_rows(num_x, 64)
        whole = made(x)
        check_equal_bits(make_linear(compact(70, 64, 32).widened())(x), whole)
        check_equal_bits(made(x[-9:])[-1:] if num_x < MAX_THIN_ROWS else made(x)[-1:], whole[-1:])

    def test_which_weights_are_taken(self) -> None:
        store = CPU.weights(torch.float32, "none")
        assert store.allocate_compact(32, 64, 32) is not None
        for shape in ((31, 64), (32, 48), (32, 1 << 16)):
            assert not takes_compact(*shape)
            assert store.allocate_compact(*shape, 16) is None
        for other in (
            CPU.weights(torch.float32, "none", compact=False),
            CPU.weights(torch.float32, "int8"),
            CPU.weights(torch.bfloat16, "none"),
        ):
            assert other.allocate_compact(32, 64, 32) is None

    def test_a_kernel_with_other_bits_is_not_used(
        self,
        fresh_proofs: None,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        class Wrong(ThinLinear):
            def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
                y = super().__call__(x, out)
                return y if isinstance(self._weight, Tensor) else y * (1 + 2**-23)

        monkeypatch.setattr(linear, "ThinLinear", Wrong)
        assert not takes_compact(70, 64)
        assert "not usable" in caplog.text
        weight, x = compact(70, 64, 32), random(5, 64)
        assert same_bits(make_linear(weight)(x), make_linear(weight.widened())(x))


def test_rows_that_are_looked_up() -> None:
    for block_size in BLOCK_SIZES:
        weight = compact(70, 64, block_size)
        token_ids = torch.tensor([69, 0, 7, 7])
        assert same_bits(rows_of(weight, token_ids), rows_of(weight.widened(), token_ids))


@pytest.mark.parametrize(("features", "works"), [("+avx,+avx2,+fma", "True"), ("+sse2", "False")])
def test_on_smaller_processors(features: str, works: str) -> None:
    """Compiled for another processor than this one, in a process of its own."""
    program = (
        "import torch; from diptych.engine.backends.cpu.linear import *;"
        "from tests.integration.linear.test_compact_linear import compact, same_bits;"
        "weight = compact(131, 576, 32);"
        "linears = make_linear(weight), make_linear(weight.widened());"
        "rows = [torch.randn(n, 576) for n in (1, 70, 130)];"
        "print(all(same_bits(*(made(x) for made in linears)) for x in rows), compact_works())"
    )
    variables = {"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": features}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["True", works]
