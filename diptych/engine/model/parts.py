"""What the model is written in: the parts that a device makes for it.

Linear layers, the operations between them and attention. The model is described once, in
terms of these (:mod:`diptych.engine.model.layers`); results go into memory that the caller
gives, so that the same description may run at once, be written down as a program, or
be captured as a graph. Everything is called on the model thread only.
"""

from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych.engine.inputs import StepInputs
from diptych.engine.model.compact import CompactWeight, Weight
from diptych.engine.model.fp8 import Fp8Weight
from diptych.engine.model.grouped import GroupedWeight, GroupFormat

Rows = NDArray[np.int64]  # numbers of rows of a step's flat batch, on the host


class Linear(Protocol):
    """``x @ weight.T + bias``; a row's result does not depend on its neighbours' contents.

    It may depend, by rounding, on how many there are.
    """

    @property
    def in_features(self) -> int: ...
    @property
    def out_features(self) -> int: ...
    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x: [num_rows, in_features] -> [num_rows, out_features], same element type.

        The result is ``out`` where that is given; it must be contiguous.
        """
        ...


class GroupedStore(Protocol):
    """Takes weights as small numbers by groups, and multiplies floats by them as they are."""

    def allocate(self, kind: GroupFormat) -> GroupedWeight | None:
        """Memory for one, to be filled by the caller; None where such a weight is not taken."""
        ...

    def linear(self, weight: GroupedWeight, bias: Tensor | None) -> Linear:
        """Of what was allocated."""
        ...


class Fp8Store(Protocol):
    """Takes weights in 8-bit floats with one scale for each row, to multiply them by such."""

    def allocate(self, num_rows: int, num_columns: int) -> Fp8Weight:
        """Memory for one, to be filled by the caller."""
        ...

    def linear(self, weight: Fp8Weight, bias: Tensor | None) -> Linear:
        """Of what was allocated. Raises ConfigurationError: a scale is not finite."""
        ...


class WeightStore(Protocol):
    """Takes a checkpoint's tensors and keeps them as this device computes with them best."""

    @property
    def dtype(self) -> torch.dtype:
        """Of inputs and results; linear layers may keep their weights otherwise."""
        ...

    @property
    def device(self) -> torch.device:
        """Where tensors are to be when they come."""
        ...

    @property
    def grouped(self) -> GroupedStore | None:
        """For weights that are stored so; None: they are to come as what they stand for."""
        ...

    @property
    def fp8(self) -> Fp8Store | None:
        """The same of weights in 8-bit floats."""
        ...

    def allocate(self, num_rows: int, num_columns: int) -> Tensor:
        """Memory for an embedding or a layer's weight, to be filled by the caller: it stays."""
        ...

    def allocate_compact(
        self, num_rows: int, num_columns: int, block_size: int
    ) -> CompactWeight | None:
        """The same for one in compact form; None where such a weight is not taken."""
        ...

    def linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        """Of what was allocated, kept as it is or packed. [out_features, in_features].

        Raises:
            ConfigurationError: it cannot be quantised.
        """
        ...

    def tied_head(self, embedding: Weight) -> Linear:
        """Of an embedding; not copied where it can be used as it is."""
        ...


class Rotation(NamedTuple):
    """Rotary embedding at the positions of a step's rows."""

    cos: Tensor  # [N, head_dim / 2] float32
    sin: Tensor

    @classmethod
    def at(cls, positions: Tensor, frequencies: Tensor, factor: float = 1.0) -> "Rotation":
        """positions: [N]; frequencies: [head_dim / 2] float32, angle per position.

        factor: of both, so that products of queries and keys have its square.
        """
        angles = positions.float()[:, None] * frequencies
        if factor == 1.0:
            return cls(angles.cos(), angles.sin())
        return cls(angles.cos().mul_(factor), angles.sin().mul_(factor))


class LayerOps(Protocol):
    """A layer's operations between its attention and its weights; rows do not meet.

    Results go into the tensors that are given for them, all contiguous.
    """

    def multiply(self, linear: Linear, x: Tensor, out: Tensor | None = None) -> Tensor:
        """linear(x), which is ``out`` where that is given."""
        ...

    def norm(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """RMS norm. x, out: [N, size]; weight: [size] float32."""
        ...

    def add_norm(
        self, x: Tensor, y: Tensor, y_weight: Tensor | None, weight: Tensor | None, out: Tensor
    ) -> None:
        """x += y, normed where it has a weight; out = norm(x) where that has one.

        x, y, out: [N, hidden_size]; y and out may be one.
        """
        ...

    def rotate(
        self,
        qkv: Tensor,
        rotation: Rotation,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        q: Tensor,
        kv: Tensor,
    ) -> None:
        """Norm (where weights are given) and rotate queries and keys; copy values.

        qkv: [N, (num_heads + 2 * num_kv_heads) * head_dim]; q: [N, num_heads, head_dim];
        kv: [N, 2, num_kv_heads, head_dim].
        """
        ...

    def gate(self, gate_up: Tensor, out: Tensor) -> None:
        """out = activation(gate) * up. gate_up: [N, 2 * size]; out: [N, size]."""
        ...

    def multiply_gated(self, linear: Linear, x: Tensor, gate_up: Tensor, out: Tensor) -> None:
        """The same of linear(x). gate_up: [N, 2 * size], memory that may be used for it."""
        ...


class AttentionStep(Protocol):
    """Attention of one step; masks and tables are made once for all layers."""

    def __call__(
        self, layer: int, q: Tensor, kv: Tensor, out: Tensor, rows: Rows | None = None
    ) -> None:
        """Write kv, then attend.

        q, out: [N, num_heads, head_dim]; kv: [N, 2, num_kv_heads, head_dim] (keys,
        values). rows: [R], the only ones that are wanted; the others may hold anything.
        """
        ...


class Attention(Protocol):
    """Attention over one KV cache.

    A step writes a layer's new keys and values into their slots and attends from every
    row of the flat batch to the sequence it belongs to. Only slots that hold the
    sequence's own tokens are ever used: what else lies in a block, or in a padded
    table, cannot reach a result.
    """

    def begin_step(self, inputs: StepInputs) -> AttentionStep: ...
