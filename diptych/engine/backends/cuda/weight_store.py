"""Weights on a device: plain ones, and whole numbers by groups as they are stored."""

import torch
from torch import Tensor

from diptych.engine.backends.cuda.grouped_linear import GroupedLinear, takes
from diptych.engine.model.compact import Weight
from diptych.engine.model.grouped import GroupedWeight, GroupFormat
from diptych.engine.model.parts import Fp8Store, GroupedStore, Linear, WeightStore


class DeviceStore:
    """Implements ``WeightStore``."""

    def __init__(self, plain: WeightStore) -> None:
        """plain: keeps all that is stored as floats."""
        self._plain = plain

    @property
    def dtype(self) -> torch.dtype:
        return self._plain.dtype

    @property
    def device(self) -> torch.device:
        return self._plain.device

    @property
    def grouped(self) -> GroupedStore | None:
        return _GroupedStore(self.device) if self.fp8 is None else None

    @property
    def fp8(self) -> Fp8Store | None:
        return self._plain.fp8

    def allocate(self, num_rows: int, num_columns: int) -> Tensor:
        return self._plain.allocate(num_rows, num_columns)

    def allocate_compact(self, num_rows: int, num_columns: int, block_size: int) -> None:
        """Compact weights are widened here."""

    def linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        return self._plain.linear(weight, bias)

    def tied_head(self, embedding: Weight) -> Linear:
        return self._plain.tied_head(embedding)


class _GroupedStore:
    """Implements ``GroupedStore``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocate(self, kind: GroupFormat) -> GroupedWeight | None:
        return GroupedWeight.empty(kind, self._device) if takes(kind) else None

    def linear(self, weight: GroupedWeight, bias: Tensor | None) -> Linear:
        return GroupedLinear(weight, bias)
