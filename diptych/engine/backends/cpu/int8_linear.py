"""A linear layer in int8: a scale for each output channel, and for each span of an input row.

Symmetric: a weight row is its scale times -127..127, and so is each span of 64 inputs
of a row, with a scale of its own (one scale for a whole row costs SmolLM2 twice
the perplexity lost). A row's result depends on that row alone, bit for bit, at
every batch size and with every kernel. On the CPU, for float32 inputs.
"""

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from diptych.engine.backends.cpu.linear import Linear
from diptych.engine.backends.cpu.workspace import Workspace
from diptych.errors import ConfigurationError

if TYPE_CHECKING:
    from diptych.engine.backends.cpu.kernels.loop import Call

SPAN = 64  # inputs of a row that share a scale
_SLICE_ROWS = 512
_TINY = 1e-30  # a scale below this is zero: its reciprocal would overflow
_ROWS_PER_ITEM = 16  # fewer are not worth another thread


class Quantised(NamedTuple):
    """Rows as ``values * scales[:, None]``."""

    values: Tensor  # [num_rows, size] int8, -127 to 127
    scales: Tensor  # [num_rows] float32; NaN for a row that is not all finite


def quantise(rows: Tensor) -> Quantised:
    """Each row by its largest magnitude. rows: [num_rows, size] float32.

    The error of a value is at most half its row's scale.
    """
    scales = torch.where(rows.isfinite().all(1), rows.abs().amax(1) / 127, torch.nan)
    ratios = torch.where(scales > _TINY, 1 / scales, 0)
    values = (rows * ratios[:, None]).nan_to_num().round().to(torch.int8)
    return Quantised(values, scales)


class PlainInt8Linear:
    """In torch's public operators, for any machine, slowly. The reference of the others."""

    def __init__(self, weight: Quantised, bias: Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias
        self.out_features, self.in_features = weight.values.shape

    def __call__(self, x: Tensor) -> Tensor:
        whole, rest = divmod(self.in_features, SPAN)
        spans = [SPAN] * whole + [rest] * bool(rest)
        y = x.new_zeros(len(x), self.out_features)
        for inputs, values in zip(
            x.split_with_sizes(spans, 1),
            self._weight.values.split_with_sizes(spans, 1),
            strict=True,
        ):
            rows = quantise(inputs)
            # A span's sums are below 2**24: exact in float32.
            y += F.linear(rows.values.float(), values.float()) * rows.scales[:, None]
        y *= self._weight.scales
        return y if self._bias is None else y + self._bias


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

    def __call__(self, x: Tensor) -> Tensor:
        y = torch.empty(len(x), self.out_features)
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
    step = _SLICE_ROWS // channels
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
    num_slices = -(-len(weight) // _SLICE_ROWS)  # so that little memory is taken at a time
    slices = [quantise(rows) for rows in weight.tensor_split(num_slices)]
    quantised = Quantised(*(torch.cat(parts) for parts in zip(*slices, strict=True)))
    if not bool(quantised.scales.isfinite().all()):
        raise ConfigurationError("quantization int8: a weight is not a finite number")
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
