"""One row by a weight in 16-bit floats, in the interpreter, against its definition."""

from tests import triton_interpreter  # noqa: F401

# isort: split
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from diptych.engine.backends.cuda.backend import CudaBackend
from diptych.engine.backends.cuda.float_linear import FloatLinear
from diptych.engine.backends.torch.linear import PlainLinear


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape", [(64, 1024), (3, 100), (1, 1), (33, 1500), (4096, 512), (4101, 70)]
)
def test_one_row(shape: tuple[int, int], dtype: torch.dtype, has_bias: bool) -> None:
    """Of few outputs and of many, of sizes that no tile divides."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=generator).to(dtype)
    x = torch.randn(1, shape[1], generator=generator).to(dtype)
    bias = torch.randn(shape[0], generator=generator).to(dtype) if has_bias else None
    linear = FloatLinear(weight, bias)
    want = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    out = torch.full((1, shape[0]), torch.nan, dtype=dtype)
    assert linear(x, out) is out
    assert torch.equal(linear(x), out)
    # The interpreter cuts off what a device rounds.
    error = (out.float() - want).abs() / want.abs().clamp(min=1e-2 * shape[1] ** 0.5)
    assert float(error.max()) <= 2 * torch.finfo(dtype).eps


def test_what_is_not_a_number_spoils_its_own_output_alone() -> None:
    weight = torch.ones(40, 64, dtype=torch.bfloat16)
    weight[7, 3] = torch.nan
    got = FloatLinear(weight)(torch.ones(1, 64, dtype=torch.bfloat16))
    assert got.isnan().nonzero().tolist() == [[0, 7]]
    assert bool((got[0, :7] == 64).all())


def test_more_rows_are_multiplied_by_torch() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(40, 64, generator=generator).bfloat16()
    x = torch.randn(3, 64, generator=generator).bfloat16()
    assert torch.equal(FloatLinear(weight)(x), F.linear(x, weight))
    assert FloatLinear(weight)(x[:0]).shape == (0, 40)


@pytest.mark.parametrize(
    ("dtype", "kind"), [(torch.bfloat16, FloatLinear), (torch.float32, PlainLinear)]
)
def test_which_weights_are_taken(dtype: torch.dtype, kind: type) -> None:
    store = CudaBackend(torch.device("cpu")).weights(dtype, "none")
    assert type(store.linear(torch.zeros(4, 8, dtype=dtype), None)) is kind
    assert type(store.tied_head(torch.zeros(4, 8, dtype=dtype))) is kind
    columns = torch.zeros(4, 8, dtype=dtype)[:, :3]
    assert type(store.linear(columns, None)) is PlainLinear
