"""Weights on a device: plain ones, and small numbers, as they are stored or rounded."""

import torch
from torch import Tensor

from diptych.engine.backends.cuda.float_linear import FloatLinear
from diptych.engine.backends.cuda.fp8_linear import DeviceFp8Weights
from diptych.engine.backends.cuda.grouped_linear import GroupedLinear, takes
from diptych.engine.backends.torch.int8_linear import quantise_weight
from diptych.engine.model.compact import Weight
from diptych.engine.model.grouped import SPAN, GroupedWeight, GroupFormat, Numbers
from diptych.engine.model.parts import Fp8Store, GroupedStore, Linear, WeightStore
from diptych.errors import ConfigurationError
from diptych.formats import Quantization

_ZERO = 128  # of whole numbers from -127 to 127, as bytes without a sign


class DeviceStore:
    """Implements ``WeightStore``."""

    def __init__(
        self, plain: WeightStore, num_processors: int, quantization: Quantization = "none"
    ) -> None:
        """plain: keeps all that is stored as floats, unless linear layers are rounded."""
        self._plain, self._num_processors = plain, num_processors
        self._rounds_to_int8 = quantization == "int8-weights"
        self._fp8: DeviceFp8Weights | None = None
        if quantization == "fp8":
            self._fp8 = DeviceFp8Weights(plain.device, plain.dtype, num_processors)

    @property
    def dtype(self) -> torch.dtype:
        return self._plain.dtype

    @property
    def device(self) -> torch.device:
        return self._plain.device

    @property
    def grouped(self) -> GroupedStore | None:
        is_kept = self._fp8 is None and not self._rounds_to_int8
        return _GroupedStore(self.device, self._num_processors) if is_kept else None

    @property
    def fp8(self) -> Fp8Store | None:
        return self._fp8

    def allocate(self, num_rows: int, num_columns: int) -> Tensor:
        return self._plain.allocate(num_rows, num_columns)

    def allocate_compact(self, num_rows: int, num_columns: int, block_size: int) -> None:
        """Compact weights are widened here."""

    def linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        assert isinstance(weight, Tensor), "compact weights are not allocated"
        if self._fp8 is None and not self._rounds_to_int8:
            return self._float(weight, bias)
        if self._fp8 is not None:
            return self._fp8.linear(self._fp8.rounded(weight), bias)
        return GroupedLinear(_rounded(weight), bias, num_processors=self._num_processors)

    def tied_head(self, embedding: Weight) -> Linear:
        return self.linear(embedding, None)

    def _float(self, weight: Tensor, bias: Tensor | None) -> Linear:
        if weight.dtype.itemsize == 2 and weight.is_contiguous():
            return FloatLinear(weight, bias)
        return self._plain.linear(weight, bias)


class _GroupedStore:
    """Implements ``GroupedStore``."""

    def __init__(self, device: torch.device, num_processors: int) -> None:
        self._device, self._num_processors = device, num_processors

    def allocate(self, kind: GroupFormat) -> GroupedWeight | None:
        return GroupedWeight.empty(kind, self._device) if takes(kind) else None

    def linear(self, weight: GroupedWeight, bias: Tensor | None) -> Linear:
        return GroupedLinear(weight, bias, num_processors=self._num_processors)


def _rounded(weight: Tensor) -> GroupedWeight:
    """Whole numbers of a weight in floats, a scale for each row. Raises ConfigurationError."""
    num_rows, num_columns = weight.shape
    kind = GroupFormat(num_rows, num_columns, Numbers.INT8, group_size=num_columns)
    if not takes(kind):
        raise ConfigurationError(
            f"quantization int8-weights: a layer has {num_columns} inputs, not a multiple of {SPAN}"
        )
    quantised = quantise_weight(weight)
    rounded = GroupedWeight.empty(kind, weight.device)
    assert rounded.zeros is not None
    rounded.pack(quantised.values.view(torch.uint8) ^ _ZERO)
    rounded.zeros.fill_(_ZERO)
    rounded.scales.copy_(quantised.scales[:, None])
    return rounded
