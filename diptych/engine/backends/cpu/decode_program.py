"""Decode steps of compiled loops: all layers in one go.

The model's own description of its layers is followed once for each number of rows, by
operations that write their calls down instead of running them. Between steps only the
inputs and where the context lies are changed. Model thread only.
"""

from collections import defaultdict
from functools import partial
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych.engine.backends.base import ForwardPass
from diptych.engine.backends.cpu import paged_decode
from diptych.engine.backends.cpu.kernels.loop import Call
from diptych.engine.backends.cpu.kernels.program import Program
from diptych.engine.backends.cpu.kv_writer import KVWriter
from diptych.engine.backends.cpu.layer_ops import CompiledLayerOps, WrittenLayerOps
from diptych.engine.backends.cpu.linear import MAX_THIN_ROWS, CompiledLinear
from diptych.engine.backends.cpu.paged_decode import PagedDecode
from diptych.engine.backends.cpu.workspace import Workspace
from diptych.engine.backends.torch.kv_access import KVAccess
from diptych.engine.inputs import StepInputs
from diptych.engine.kv.cache import KVCache
from diptych.engine.model.config import ModelConfig
from diptych.engine.model.decoder import Decoder
from diptych.engine.model.layer_config import RopeConfig
from diptych.engine.model.layers import LayerBuffers, run_layers
from diptych.engine.model.parts import Rotation, Rows


class _Written(NamedTuple):
    """A program for one number of rows, and where its inputs go."""

    program: Program
    x: Tensor  # [num_rows, hidden_size], embeddings first and hidden states at the end
    rotations: dict[RopeConfig, Rotation]
    slot_rows: Tensor
    attention: dict[int | None, NDArray[np.int64]]  # which calls attend, by window


class DecodePrograms:
    """Of one model on one KV cache, for up to MAX_THIN_ROWS rows. Implements ``ForwardPass``."""

    def __init__(self, model: Decoder, kv_cache: KVCache, otherwise: ForwardPass) -> None:
        """The model and the cache must be such that :meth:`of` makes one."""
        self._model, self._config, self._kv_cache = model, model.config, kv_cache
        self._otherwise = otherwise
        self._access = KVAccess(model.config, kv_cache, model.dtype)
        writer = KVWriter.of(self._access)
        assert writer is not None
        self._writer = writer
        self._workspace = Workspace(MAX_THIN_ROWS)
        self._written: dict[int, _Written] = {}

    @classmethod
    def of(cls, model: Decoder, kv_cache: KVCache, otherwise: ForwardPass) -> Self | None:
        """None where a part of a step has no compiled loop; ``otherwise`` does other steps."""
        complete = (
            isinstance(model.ops, CompiledLayerOps)
            and paged_decode.supports(model.config, kv_cache.dtype)
            and all(isinstance(linear, CompiledLinear) for linear in model.weights.linears)
            and KVWriter.of(KVAccess(model.config, kv_cache, model.dtype)) is not None
        )
        return cls(model, kv_cache, otherwise) if complete else None

    def __call__(self, inputs: StepInputs, rows: Rows) -> Tensor:
        hidden = self.decode(inputs)
        if hidden is None:
            return self._otherwise(inputs, rows)
        return hidden.index_select(0, torch.from_numpy(rows))

    def decode(self, inputs: StepInputs) -> Tensor | None:
        """Hidden states of all rows; None for a step of anything but a few single tokens.

        The result lasts until the next step.
        """
        num_rows = len(inputs.token_ids)
        if inputs.decodes is None or inputs.prefills or num_rows > MAX_THIN_ROWS:
            return None
        attention = PagedDecode(self._config, self._kv_cache, inputs.decodes)
        written = self._written.get(num_rows)
        if written is None:
            written = self._written[num_rows] = self._write(num_rows, attention)
        written.x.copy_(self._model.embed(inputs.token_ids))
        for rope, rotation in self._model.rotations(inputs.positions).items():
            for target, values in zip(written.rotations[rope], rotation, strict=True):
                target.copy_(values)
        written.slot_rows.copy_(self._access.slot_rows(inputs.slots))
        for window, calls in written.attention.items():
            written.program.update(calls, attention.step_words(window))
        written.program.run(torch.get_num_threads())
        return written.x

    def _write(self, num_rows: int, attention: PagedDecode) -> _Written:
        config = self._config
        take = partial(self._workspace.take, num_rows=num_rows)
        x = take("x", size=config.hidden_size)
        slot_rows = take("slot_rows", size=2 * config.num_kv_heads, dtype=torch.int64).view(-1)
        rotations = {
            rope: Rotation(
                *(take(f"{part} {i}", size=config.head_dim // 2) for part in ("cos", "sin"))
            )
            for i, rope in enumerate(dict.fromkeys(layer.rope for layer in config.layers))
        }
        buffers = LayerBuffers.of(config, lambda name, size: take(name, size=size))
        ops = WrittenLayerOps(config, self._workspace)
        attend = _WrittenAttention(config, ops.calls, attention, self._writer, slot_rows)
        run_layers(config, self._model.weights.layers, ops, attend, rotations, x, buffers)
        where = {window: np.array(indices) for window, indices in attend.places.items()}
        return _Written(Program(ops.calls), x, rotations, slot_rows, where)


class _WrittenAttention:
    """Attention of single tokens that is written down. Implements ``AttentionStep``."""

    def __init__(
        self,
        config: ModelConfig,
        calls: list[Call],
        attention: PagedDecode,
        writer: KVWriter,
        slot_rows: Tensor,
    ) -> None:
        self.places: defaultdict[int | None, list[int]] = defaultdict(list)
        """Which of the calls attend, by window."""
        self._config, self._calls = config, calls
        self._attention, self._writer, self._slot_rows = attention, writer, slot_rows

    def __call__(
        self, layer: int, q: Tensor, kv: Tensor, out: Tensor, rows: Rows | None = None
    ) -> None:
        self._calls.append(self._writer.call(layer, self._slot_rows, kv))
        self.places[self._config.layers[layer].sliding_window].append(len(self._calls))
        self._calls.append(self._attention.call(layer, q, out))
