"""Weights on a device: plain ones, and whole numbers by groups, as they are stored or rounded."""

import torch
from torch import Tensor

from diptych.engine.backends.cuda.grouped_linear import GroupedLinear, takes
from diptych.engine.backends.torch.int8_linear import quantise_weight
from diptych.engine.model.compact import Weight
from diptych.engine.model.grouped import SPAN, GroupedWeight, GroupFormat, Numbers
from diptych.engine.model.parts import Fp8Store, GroupedStore, Linear, WeightStore
from diptych.errors import ConfigurationError

_ZERO = 128  # of whole numbers from -127 to 127, as bytes without a sign


class DeviceStore:
    """Implements ``WeightStore``."""

    def __init__(self, plain: WeightStore, *, rounds_to_int8: bool = False) -> None:
        """plain: keeps all that is stored as floats, unless linear layers are rounded."""
        self._plain, self._rounds_to_int8 = plain, rounds_to_int8

    @property
    def dtype(self) -> torch.dtype:
        return self._plain.dtype

    @property
    def device(self) -> torch.device:
        return self._plain.device

    @property
    def grouped(self) -> GroupedStore | None:
        is_kept = self.fp8 is None and not self._rounds_to_int8
        return _GroupedStore(self.device) if is_kept else None

    @property
    def fp8(self) -> Fp8Store | None:
        return self._plain.fp8

    def allocate(self, num_rows: int, num_columns: int) -> Tensor:
        return self._plain.allocate(num_rows, num_columns)

    def allocate_compact(self, num_rows: int, num_columns: int, block_size: int) -> None:
        """Compact weights are widened here."""

    def linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        if self._rounds_to_int8:
            assert isinstance(weight, Tensor), "compact weights are not allocated"
            return GroupedLinear(_rounded(weight), bias)
        return self._plain.linear(weight, bias)

    def tied_head(self, embedding: Weight) -> Linear:
        if self._rounds_to_int8:
            return self.linear(embedding, None)
        return self._plain.tied_head(embedding)


class _GroupedStore:
    """Implements ``GroupedStore``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocate(self, kind: GroupFormat) -> GroupedWeight | None:
        return GroupedWeight.empty(kind, self._device) if takes(kind) else None

    def linear(self, weight: GroupedWeight, bias: Tensor | None) -> Linear:
        return GroupedLinear(weight, bias)


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
