"""Products with weights that are no plain floats, against their definition: error and time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from diptych.engine.backends.base import Backend
from diptych.engine.backends.torch.fp8_linear import Fp8Weights, PlainFp8Linear
from diptych.engine.model.grouped import GroupFormat, Numbers
from diptych.engine.model.parts import Linear

MAX_ERROR = 0.01  # root mean square, of the result's

Stopwatch = Callable[[Callable[[], object]], float]  # seconds that the device takes for it


@dataclass(frozen=True, slots=True)
class Case:
    """Rows of inputs, and a weight."""

    stored: Literal["4 bits", "8 bits", "fp8 by groups", "fp8"]
    num_rows: int
    num_outputs: int
    num_inputs: int


_NUMBERS = {"4 bits": Numbers.INT4, "8 bits": Numbers.INT8, "fp8 by groups": Numbers.FP8}
CASES = tuple(
    Case(stored, num_rows, *shape)
    for stored in ("4 bits", "8 bits", "fp8 by groups", "fp8")
    for num_rows in (1, 4, 16, 64, 256, 2048)
    for shape in ((6144, 4096), (28_672, 4096), (4096, 14_336))
)


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one case."""

    case: str
    error: float
    seconds: float
    plain_seconds: float  # torch's product with the weight in the inputs' type
    weight_bytes_per_s: float  # as it is stored
    holds: bool


def check(case: Case, backend: Backend, dtype: torch.dtype, stopwatch: Stopwatch) -> Measured:
    """A random weight, made on the device."""
    generator = torch.Generator(backend.device).manual_seed(1)
    x = torch.empty(case.num_rows, case.num_inputs, dtype=dtype, device=backend.device)
    x.normal_(generator=generator)
    if case.stored == "fp8":
        linear, exact, num_bytes = _fp8(case, backend, dtype, generator)
        want = PlainFp8Linear(Fp8Weights(backend.device, dtype).rounded(exact))(x.float())
    else:
        linear, exact, num_bytes = _grouped(case, backend, dtype, generator)
        want = F.linear(x.float(), exact)
    error = float((linear(x).float() - want).square().mean().sqrt() / want.square().mean().sqrt())
    seconds = stopwatch(lambda: linear(x))
    plain = exact.to(dtype)
    plain_seconds = stopwatch(lambda: F.linear(x, plain))
    return Measured(
        repr(case), error, seconds, plain_seconds, num_bytes / seconds, error <= MAX_ERROR
    )


def _fp8(
    case: Case, backend: Backend, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Linear, Tensor, int]:
    exact = torch.empty(case.num_outputs, case.num_inputs, device=backend.device)
    exact.normal_(generator=generator)
    linear = backend.weights(dtype, "fp8").linear(exact, None)
    return linear, exact, exact.numel()


def _grouped(
    case: Case, backend: Backend, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Linear, Tensor, int]:
    store = backend.weights(dtype, "none").grouped
    assert store is not None
    numbers = _NUMBERS[case.stored]
    weight = store.allocate(GroupFormat(case.num_outputs, case.num_inputs, numbers, 128))
    assert weight is not None
    # Of floats those below 2**-3 only, of whole numbers half of those there are.
    weight.numbers.random_(0, 32 if weight.zeros is None else 256, generator=generator)
    if weight.zeros is not None:
        weight.zeros.fill_(1 << (numbers.bits - 1))
    weight.scales.uniform_(0.5, 1.5, generator=generator)
    num_bytes = sum(part.nbytes for part in weight[:3] if isinstance(part, Tensor))
    return store.linear(weight, None), weight.widened(), num_bytes
