"""The seam of matrix products with weights: how a layer's weight is kept and applied.

torch's own product repacks a plain weight at every call, which costs a factor of two
at decode batch sizes. In float32 kernels of ours read it as it is, one for few rows and
one for many, or a compact one that they widen as they go; other element types are packed
once by oneDNN, by operators that are private to torch. Each is proven at first use, and
:class:`PlainLinear` is the last fallback.
Nothing else knows how weights are stored.
"""

import contextlib
import logging
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from diptych.engine.backends.cpu.workspace import Workspace
from diptych.engine.backends.torch.linear import PlainLinear
from diptych.engine.model.compact import CompactWeight, Weight, widened
from diptych.engine.model.layer_config import Activation
from diptych.engine.model.parts import Linear
from diptych.models.compact import BLOCK_SIZES, HEAD_BYTES

if TYPE_CHECKING:
    from diptych.engine.backends.cpu.kernels.loop import Call

_LOG = logging.getLogger(__name__)
_PACK_FOR_ROWS = 16
# Measured ahead of torch's product up to 64; where that catches up is not measured.
MAX_THIN_ROWS = 96
# Of a compact weight: what every kernel can read.
_COMPACT_ROWS, _COMPACT_COLUMNS = 32, range(32, 1 << 15, 32)


@runtime_checkable
class CompiledLinear(Linear, Protocol):
    """One that can be a part of a program."""

    def calls(self, x: Tensor, y: Tensor, workspace: Workspace) -> "list[Call]":
        """What computes y from x; at most MAX_THIN_ROWS rows, both contiguous."""
        ...


@runtime_checkable
class GatingLinear(Linear, Protocol):
    """One of gates and the numbers they are for, that can gate as it multiplies."""

    def can_gate(self, num_rows: int) -> bool:
        """Whether it gates so many rows."""
        ...

    def gated(self, x: Tensor, activation: Activation, out: Tensor) -> None:
        """out = activation(gate) * up, the halves of the product. out: [N, out_features / 2]."""
        ...


class PackedLinear:
    """A weight packed once for oneDNN on the CPU; the plain one is not kept."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._bias = bias
        self.out_features, self.in_features = weight.shape
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(
            weight.contiguous(), _PACK_FOR_ROWS
        )

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return y if out is None else out.copy_(y)


class SplitLinear:
    """A float32 weight as loaded, and a kernel for many rows on the processor's matrix unit.

    A row's result has the same bits in any batch.
    """

    def __init__(self, weight: Weight, bias: Tensor | None = None) -> None:
        """Raises ValueError: a weight that the kernel does not take."""
        # Here, because numba takes a while to import and not every process needs it.
        from diptych.engine.backends.cpu.kernels import matrix_unit

        if not matrix_unit.is_lent():
            raise ValueError("no matrix unit on this machine")
        from diptych.engine.backends.cpu.kernels import split_matmul

        self.out_features, self.in_features = weight.shape
        if not split_matmul.is_taken(*weight.shape):
            raise ValueError("no kernel for this weight")
        self._scratch = split_matmul.scratch
        self._weight = _contiguous(weight)
        self._offsets = _offsets(weight, bias)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        y = x.new_empty(len(x), self.out_features) if out is None else out
        if len(x):
            num_threads = torch.get_num_threads()
            scratch = self._scratch(num_threads)
            for call in scratch.calls(x.contiguous(), self._weight, self._offsets, y):
                call.run(num_threads)
        return y


class WideLinear:
    """A float32 weight as loaded, and a kernel for many rows that packs it as it goes.

    From MIN_ROWS rows on, a row's result has the same bits in any batch; fewer are torch's.
    """

    def __init__(self, weight: Weight, bias: Tensor | None = None) -> None:
        """Raises ValueError: a weight that the kernel does not take."""
        from diptych.engine.backends.cpu.kernels import wide_matmul

        self.out_features, self.in_features = weight.shape
        if not wide_matmul.SUPPORTED or not wide_matmul.is_taken(*weight.shape):
            raise ValueError("no kernel for this weight on this machine")
        self._scratch, self._min_rows = wide_matmul.scratch, wide_matmul.MIN_ROWS
        self._weight = _contiguous(weight)
        self._bias, self._offsets = bias, _offsets(weight, bias)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if len(x) < self._min_rows:
            return PlainLinear(widened(self._weight), self._bias)(x, out)
        y = x.new_empty(len(x), self.out_features) if out is None else out
        self._run(x, y, None)
        return y

    def can_gate(self, num_rows: int) -> bool:
        return num_rows >= self._min_rows

    def gated(self, x: Tensor, activation: Activation, out: Tensor) -> None:
        self._run(x, out, activation)

    def _run(self, x: Tensor, y: Tensor, activation: Activation | None) -> None:
        num_threads = torch.get_num_threads()
        scratch = self._scratch(num_threads)
        for call in scratch.calls(x.contiguous(), self._weight, self._offsets, y, activation):
            call.run(num_threads)


class ThinLinear:
    """A float32 weight as loaded, and a kernel for few rows that streams it once.

    Up to MAX_THIN_ROWS rows, a row's result has the same bits in any batch. More are
    for ``wide``, another linear on the same weight; torch's own by default.
    """

    def __init__(
        self, weight: Weight, bias: Tensor | None = None, wide: Linear | None = None
    ) -> None:
        """Raises ValueError: a weight that the kernel does not take."""
        from diptych.engine.backends.cpu.kernels import thin_matmul

        self.out_features, self.in_features = weight.shape
        if not thin_matmul.SUPPORTED or self.out_features < thin_matmul.MIN_COLUMNS:
            raise ValueError("no kernel for this weight on this machine")
        self._multiply = thin_matmul.multiply
        self._weight = _contiguous(weight)
        self._offsets = _offsets(weight, bias)
        self._wide = wide or PlainLinear(widened(weight), bias)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if len(x) > MAX_THIN_ROWS:
            return self._wide(x, out)
        y = x.new_empty(len(x), self.out_features) if out is None else out
        if len(x):
            self._call(x.contiguous(), y).run(torch.get_num_threads())
        return y

    def can_gate(self, num_rows: int) -> bool:
        wide = self._wide
        return num_rows > MAX_THIN_ROWS and isinstance(wide, WideLinear) and wide.can_gate(num_rows)

    def gated(self, x: Tensor, activation: Activation, out: Tensor) -> None:
        assert isinstance(self._wide, WideLinear)
        self._wide.gated(x, activation, out)

    def calls(self, x: Tensor, y: Tensor, workspace: Workspace) -> "list[Call]":
        return [self._call(x, y)]

    def _call(self, x: Tensor, y: Tensor) -> "Call":
        return self._multiply(x, self._weight, self._offsets, y)


def _contiguous(weight: Weight) -> Weight:
    return weight.contiguous() if isinstance(weight, Tensor) else weight


def _offsets(weight: Weight, bias: Tensor | None) -> Tensor:
    return torch.zeros(weight.shape[0]) if bias is None else bias.contiguous()


_Maker = Callable[[Tensor, Tensor | None], Linear]


def make_linear(weight: Weight, bias: Tensor | None = None) -> Linear:
    """The fastest linear that works here. weight: [out_features, in_features]."""
    if not isinstance(weight, Tensor):
        if takes_compact(*weight.shape):
            return ThinLinear(weight, bias, _wide_linear(weight, bias))
        weight = weight.widened()
    if weight.dtype is torch.float32 and len(weight) >= 4 and thin_works():
        return ThinLinear(weight, bias, _wide_linear(weight, bias))
    if packing_works(weight.dtype):
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)


def _wide_linear(weight: Weight, bias: Tensor | None) -> Linear:
    """The fastest one for many rows of float32."""
    for works, make in ((split_works, SplitLinear), (wide_works, WideLinear)):
        if works():
            with contextlib.suppress(ValueError):
                return make(weight, bias)
    return PlainLinear(widened(weight), bias)


@cache
def thin_works() -> bool:
    """Whether the kernel for few rows compiles here, has threads, and multiplies right."""
    return _can_compile() and _is_right(ThinLinear, torch.float32)


@cache
def split_works() -> bool:
    """The same of the kernel for many rows; and the machine has what it needs."""
    if not _can_compile():
        return False
    from diptych.engine.backends.cpu.kernels import matrix_unit

    return matrix_unit.is_lent() and _is_right(SplitLinear, torch.float32, 64)


@cache
def wide_works() -> bool:
    """The same of the kernel for many rows that needs no matrix unit."""
    return _can_compile() and _is_right(WideLinear, torch.float32, 64, (97, 113))


def takes_compact(num_rows: int, num_columns: int) -> bool:
    """Whether a compact weight of this shape is multiplied as it is, however many rows x has."""
    return num_rows >= _COMPACT_ROWS and num_columns in _COMPACT_COLUMNS and compact_works()


@cache
@torch.inference_mode()
def compact_works() -> bool:
    """Whether compact weights give the bits of those that they stand for, by both kernels."""
    if not thin_works() or not (split_works() or wide_works()):
        return False
    for size in BLOCK_SIZES:
        weight = _example(81, 96 // size, size)
        floats = weight.widened()
        few = ThinLinear(weight), ThinLinear(floats)
        many = _wide_linear(weight, None), _wide_linear(floats, None)
        for linears, rows in ((few, (1, 8)), (many, (97,))):
            for num_rows in rows:
                x = torch.linspace(-2, 2, num_rows * 96).cos().view(num_rows, 96)
                compact, plain = (linear(x) for linear in linears)
                if not torch.equal(compact, plain):
                    _LOG.warning("compact weights are not usable", extra={"block_size": size})
                    return False
    return True


def _example(num_rows: int, num_blocks: int, size: int) -> CompactWeight:
    """Any compact weight."""
    memory = torch.empty(num_rows, num_blocks, HEAD_BYTES + size, dtype=torch.uint8)
    heads = torch.linspace(-1, 1, num_rows * num_blocks * 2).view(num_rows, num_blocks, 2)
    memory[..., :HEAD_BYTES] = heads.half().float().view(torch.uint8)
    memory[..., HEAD_BYTES:] = torch.arange(size) * 8 + 3
    return CompactWeight(memory.view(num_rows, -1), size)


def _can_compile() -> bool:
    if find_spec("numba") is None:
        return False
    from diptych.engine.backends.cpu.kernels.loop import has_team

    return torch.get_num_threads() == 1 or has_team()


@cache
def packing_works(dtype: torch.dtype) -> bool:
    """Whether this torch packs weights of ``dtype`` and multiplies right with them."""
    return _is_right(PackedLinear, dtype)


@torch.inference_mode()
def _is_right(
    make: _Maker, dtype: torch.dtype, inner: int = 52, rows: tuple[int, ...] = (1, 5, 33)
) -> bool:
    """Whether these linears agree with torch's in double; if not, that is logged."""
    weight = torch.linspace(-1, 1, inner * 81).sin().view(81, inner).to(dtype)
    bias = torch.linspace(-1, 1, 81).to(dtype)
    tolerance = 8 * torch.finfo(dtype).eps
    try:
        linear = make(weight, bias)
        for num_rows in rows:
            x = torch.linspace(-2, 2, num_rows * inner).cos().view(num_rows, inner).to(dtype)
            expected = F.linear(x.double(), weight.double(), bias.double())
            error = (linear(x).double() - expected).abs().max() / expected.abs().max()
            if not error <= tolerance:
                raise ArithmeticError(f"relative error {error:.1e}")
    except Exception as error:  # noqa: BLE001 (a compiler can fail in any way)
        _LOG.warning(
            "a fast linear layer is not usable", extra={"dtype": str(dtype)}, exc_info=error
        )
        return False
    return True
