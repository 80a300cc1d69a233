"""Int8 layers: exact sums, a scale per row, and rows that know nothing of each other."""

import itertools

import pytest
import torch
from torch import Tensor

from diptych.cli.up import UpConfig
from diptych.engine.backends.cpu import int8_linear
from diptych.engine.backends.cpu.int8_linear import PackedInt8Linear, make_int8_linear
from diptych.engine.backends.torch.int8_linear import PlainInt8Linear, Quantised, quantise
from diptych.engine.model.parts import Linear
from diptych.errors import ConfigurationError, LayoutMismatchError
from diptych.v1 import common_pb2
from kvtransfer.endpoint import compare_layouts
from tests.engines import CPU, PLAIN
from tests.torch_threads import torch_threads

OUTLIER = 1e4


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def packed_linears(weight: Quantised, bias: Tensor | None = None) -> list[Linear]:
    """One for every loop that this processor can run."""
    if not int8_linear.loops_work():
        pytest.skip("this processor has no compiled int8 loops")
    return [PackedInt8Linear(weight, bias), PackedInt8Linear(weight, bias, pairs=True)]


def all_linears(weight: Quantised) -> list[Linear]:
    return [PlainInt8Linear(weight), *packed_linears(weight)]


def test_error_is_at_most_half_a_scale() -> None:
    rows = random(40, 333) * torch.logspace(-20, 20, 40)[:, None]
    values, scales = quantise(rows)
    assert values.abs().amax(1).eq(127).all()
    error = (values.double() * scales.double()[:, None] - rows).abs()
    assert bool((error <= 0.5001 * scales[:, None]).all())


def test_zero_tiny_and_broken_rows() -> None:
    rows = torch.tensor([[0.0, 0.0], [1e-38, -1e-38], [1.0, torch.inf], [torch.nan, 1.0]])
    weight = quantise(random(5, 2))
    for linear in all_linears(weight):
        y = linear(rows)
        assert torch.equal(y[:2], torch.zeros(2, 5))
        assert bool(y[2:].isnan().all()), "what is no number must stay visible"


@pytest.mark.parametrize("shape", [(1, 1), (33, 7), (70, 50), (96, 1536), (257, 130)])
def test_loops_equal_plain_torch(shape: tuple[int, int]) -> None:
    """Bit for bit, at sizes that fill no tile, and at every number of rows and threads."""
    out_features, in_features = shape
    weight, bias = quantise(random(*shape)), random(out_features, seed=1)
    for num_rows, has_bias in itertools.product((1, 2, 3, 4, 7, 8, 15, 40), (False, True)):
        x = random(num_rows, in_features, seed=num_rows)
        want = PlainInt8Linear(weight, bias if has_bias else None)(x)
        for linear in packed_linears(weight, bias if has_bias else None):
            for num_threads in (1, 2):
                with torch_threads(num_threads):
                    assert torch.equal(linear(x), want), (num_rows, has_bias, num_threads)


def test_largest_sums_do_not_saturate() -> None:
    """127 * 127 added up without a sign change, where byte products of AVX2 stop at 32767."""
    in_features = 4096
    weight = Quantised(torch.full((64, in_features), 127, dtype=torch.int8), torch.ones(64))
    weight.values[1::2] = -127
    x = torch.full((9, in_features), 127.0)
    x[1::2] = -127.0
    want = (x.double() @ weight.values.double().T).float()
    assert float(want.abs().max()) == 127 * 127 * in_features
    for linear in all_linears(weight):
        assert torch.equal(linear(x), want)


@pytest.mark.parametrize("num_rows", [2, 9, 40])
def test_a_row_does_not_depend_on_its_neighbours(num_rows: int) -> None:
    weight = quantise(random(70, 50))
    x = random(num_rows, 50)
    for linear in all_linears(weight):
        alone = torch.cat([linear(row[None]) for row in x])
        beside = x.clone()
        beside[0] *= OUTLIER
        assert torch.equal(linear(x), alone)
        assert torch.equal(linear(beside)[1:], alone[1:])


def test_close_to_the_float_layer() -> None:
    weight, bias, x = random(300, 200), random(300, seed=1), random(20, 200, seed=2)
    want = torch.nn.functional.linear(x, weight, bias)
    got = make_int8_linear(weight, bias)(x)
    assert float((got - want).norm() / want.norm()) < 0.015
    x = x.T.contiguous().T
    assert torch.equal(make_int8_linear(weight, bias)(x), got), "strides do not matter"


def test_without_the_loops_plain_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = random(70, 50), random(5, 50)
    fast = make_int8_linear(weight)(x)
    monkeypatch.setattr(int8_linear, "find_spec", lambda name: None)
    int8_linear.loops_work.cache_clear()
    try:
        plain = make_int8_linear(weight)
        assert isinstance(plain, PlainInt8Linear)
        assert torch.equal(plain(x), fast)
    finally:
        int8_linear.loops_work.cache_clear()


def test_weights_that_cannot_be_quantised() -> None:
    weight = random(4, 4)
    weight[1, 1] = torch.inf
    with pytest.raises(ConfigurationError, match="not a finite number"):
        make_int8_linear(weight)


def test_what_int8_goes_with() -> None:
    for backend in (CPU, PLAIN):
        backend.weights(torch.float32, "int8")
        backend.weights(torch.bfloat16, "none")
        with pytest.raises(ConfigurationError, match=r"needs dtype float32.*got bfloat16"):
            backend.weights(torch.bfloat16, "int8")


def test_int8_and_float_workers_do_not_pair() -> None:
    ours, theirs = (common_pb2.KVLayout(quantization=name) for name in ("int8", "none"))
    with pytest.raises(LayoutMismatchError, match=r"^quantization: .*'int8'.*'none'"):
        compare_layouts(ours, theirs)


def test_up_gives_the_flag_to_every_worker() -> None:
    plan = UpConfig(quantization="int8", worker_args="--num-blocks 8").plan()
    assert plan.worker_args == ("--quantization", "int8", "--num-blocks", "8")
