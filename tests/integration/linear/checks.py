"""What a linear layer for many rows is held to, whatever computes it."""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from diptych.engine.model.parts import Linear


def random(*shape: int) -> Tensor:
    """The same numbers for the same shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def check_as_exact_as_torch(
    make: Callable[[Tensor, Tensor | None], Linear],
    shapes: Iterable[tuple[int, int]],
    num_rows: int,
) -> None:
    """In float32, with a bias and without, for every (out_features, in_features)."""
    for out_features, in_features in shapes:
        weight, bias = random(out_features, in_features), random(out_features)
        x = random(num_rows, in_features)
        size = x.double().abs() @ weight.double().abs().t()  # of what is summed
        for given in (bias, None):
            want = F.linear(x.double(), weight.double(), None if given is None else given.double())
            made = make(weight, given)
            assert (made.out_features, made.in_features) == (out_features, in_features)
            out = torch.full((num_rows, out_features), torch.nan)
            assert made(x, out) is out
            assert torch.equal(out, made(x))
            error = (out.double() - want).abs()
            assert (error / (size + bias.double().abs())).max() < 4 * torch.finfo().eps
            if num_rows > 1:  # torch adds those of a single row in another order
                of_torch = (F.linear(x, weight, given).double() - want).abs()
                assert error.square().mean() < 2 * of_torch.square().mean()


def mixed_rows(num_rows: int, in_features: int) -> Tensor:
    """Rows of which some would spoil their neighbours: huge, infinite, zeros."""
    x = random(num_rows, in_features)
    x[1] *= 1e30
    x[2] = torch.inf
    x[3] = 0
    return x


def check_equal_bits(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
