"""A linear layer in int8 by compiled loops, with the bits of the plain one. On the CPU."""

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from diptych.engine.backends.cpu.workspace import Workspace
from diptych.engine.backends.torch.int8_linear import (
    SLICE_ROWS,
    SPAN,
    PlainInt8Linear,
    Quantised,
    quantise_weight,
)
from diptych.engine.model.parts import Linear

if TYPE_CHECKING:
    from diptych.engine.backends.cpu.kernels.loop import Call

_ROWS_PER_ITEM = 16  # fewer are not worth another thread


class PackedInt8Linear:
    """A weight packed for the compiled loops; the plain one is not kept."""

    def __init__(self, weight: Quantised, bias: Tensor | None, *, pairs: bool = False) -> None:
        """pairs: use the loop for processors that have AVX2 only.

        Raises:
            RuntimeError: this processor has not even that.
        """
        from diptych.engine.backends.cpu.kernels import int8_loops

        self._quantise = int8_loops.quantise
        by_bytes = None if pairs else int8_loops.multiply_bytes
        multiply = by_bytes or int8_loops.multiply_pairs
        if multiply is None:
            raise RuntimeError("the int8 loops need AVX2")
        self._multiply = multiply
        self._row_dtype = torch.int8 if by_bytes else torch.int16
        self._scales, self._bias = weight.scales.contiguous(), bias
        self.out_features, self.in_features = weight.values.shape
        self._packed = _pack(
            weight.values, int8_loops.CHANNELS, int8_loops.DEPTH, int8_loops.BLOCKS
        )
        self._num_tiles = self._packed.shape[0] // int8_loops.BLOCKS
        self._num_spans = self._packed.shape[1] // int8_loops.SPAN_GROUPS

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        y = torch.empty(len(x), self.out_features) if out is None else out
        for call in self.calls(x.contiguous(), y, Workspace(len(x))):
            call.run(torch.get_num_threads())
        return y

    def calls(self, x: Tensor, y: Tensor, workspace: Workspace) -> "list[Call]":
        """What computes y from x; any number of rows, both contiguous."""
        num_rows = len(x)
        q = workspace.take("int8.q", num_rows, self._num_spans * SPAN, self._row_dtype)
        zeros = workspace.take("int8.zeros", num_rows, self._num_spans, torch.int32)
        scales = workspace.take("int8.scales", num_rows, self._num_spans)
        rounding = self._quantise.call(
            -(-num_rows // _ROWS_PER_ITEM),
            _ROWS_PER_ITEM,
            num_rows,
            self.in_features,
            self._num_spans,
            int(self._row_dtype is torch.int16),
            x,
            q,
            zeros,
            scales,
        )
        product = self._multiply.call(
            self._num_tiles,
            num_rows,
            self._num_spans,
            self.out_features,
            q,
            zeros,
            scales,
            self._packed,
            self._scales,
            0 if self._bias is None else self._bias,
            y,
        )
        return [rounding, product]


def _pack(values: Tensor, channels: int, depth: int, blocks: int) -> Tensor:
    """values: [out_features, in_features] int8 -> [blocks, groups, channels, depth] uint8."""
    num_rows, size = values.shape
    num_blocks, num_groups = (
        -(-num_rows // (channels * blocks)) * blocks,
        -(-size // SPAN) * SPAN // depth,
    )
    packed = torch.full((num_blocks, num_groups, channels, depth), 128, dtype=torch.uint8)
    step = SLICE_ROWS // channels
    for first in range(0, num_blocks, step):
        rows = values[first * channels : (first + step) * channels].view(torch.uint8) ^ 128
        rows = F.pad(rows, (0, -size % SPAN, 0, -len(rows) % channels), value=128)
        some = rows.view(-1, channels, num_groups, depth).transpose(1, 2)
        packed[first : first + len(some)] = some
    return packed


def make_int8_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Quantise and pack. weight: [out_features, in_features] float32, on the CPU.

    Raises:
        ConfigurationError: the weight is not finite.
    """
    quantised = quantise_weight(weight)
    if loops_work():
        return PackedInt8Linear(quantised, bias)
    return PlainInt8Linear(quantised, bias)


@cache
def loops_work() -> bool:
    """Whether the compiled loops run here and agree with plain torch at the largest sums."""
    if find_spec("numba") is None:
        return False
    with torch.inference_mode():
        values = torch.full((70, 90), 127, dtype=torch.int8)
        values[::3], values[:, ::7] = -127, 5
        weight = Quantised(values, torch.linspace(0.5, 2, 70))
        x = torch.linspace(-1, 1, 15 * 90).mul(40).sin().view(15, 90)
        x[::2] = x[::2].sign()
        try:
            return torch.equal(PackedInt8Linear(weight, None)(x), PlainInt8Linear(weight)(x))
        except (ImportError, OSError, RuntimeError):
            return False
