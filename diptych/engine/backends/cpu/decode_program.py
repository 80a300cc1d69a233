"""Decode steps of compiled loops: all layers in one go.

The same loops as :class:`diptych.engine.model.decoder.Decoder` and its attention call one by
one, written down once for each number of rows. Between steps only the inputs and
where the context lies are changed. Model thread only.
"""

from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych.engine.backends.cpu.kv_access import KVAccess
from diptych.engine.backends.cpu.layer_ops import CompiledLayerOps, Rotation
from diptych.engine.backends.cpu.linear import MAX_THIN_ROWS, CompiledLinear, Linear
from diptych.engine.backends.cpu.workspace import Workspace
from diptych.engine.inputs import StepInputs
from diptych.engine.kv.cache import KVCache
from diptych.engine.model.config import RopeConfig
from diptych.engine.model.decoder import Decoder

if TYPE_CHECKING:
    from diptych.engine.backends.cpu.kernels.loop import Call
    from diptych.engine.backends.cpu.kernels.program import Program
    from diptych.engine.backends.cpu.paged_decode import PagedDecode


class _Written(NamedTuple):
    """A program for one number of rows, and where its inputs go."""

    program: "Program"
    x: Tensor  # [num_rows, hidden_size], embeddings first and hidden states at the end
    rotations: dict[RopeConfig, Rotation]
    slot_rows: Tensor
    attention: dict[int | None, NDArray[np.int64]]  # which calls attend, by window


class DecodePrograms:
    """Of one model on one KV cache, for up to MAX_THIN_ROWS rows."""

    def __init__(self, model: Decoder, kv_cache: KVCache) -> None:
        """The model and the cache must be such that :meth:`of` makes one."""
        # Here, because numba is optional and takes a while to import.
        from diptych.engine.backends.cpu.kernels.program import Program
        from diptych.engine.backends.cpu.layer_calls import LayerCalls
        from diptych.engine.backends.cpu.paged_decode import PagedDecode

        self._make_program, self._make_attention = Program, PagedDecode
        self._model, self._config, self._kv_cache = model, model.config, kv_cache
        self._ops = LayerCalls(model.config)
        self._access = KVAccess(model.config, kv_cache, model.dtype)
        self._workspace = Workspace(MAX_THIN_ROWS)
        self._written: dict[int, _Written] = {}

    @classmethod
    def of(cls, model: Decoder, kv_cache: KVCache) -> Self | None:
        """None where a part of a step has no compiled loop."""
        if not isinstance(model.ops, CompiledLayerOps) or kv_cache.memory_kind != "DRAM":
            return None
        from diptych.engine.backends.cpu import paged_decode

        complete = (
            paged_decode.supports(model.config)
            and all(isinstance(linear, CompiledLinear) for linear in model.weights.linears)
            and KVAccess(model.config, kv_cache, model.dtype).has_loops
        )
        return cls(model, kv_cache) if complete else None

    def forward(self, inputs: StepInputs) -> Tensor | None:
        """As the decoder's; None for a step of anything but a few single tokens.

        The result lasts until the next step.
        """
        num_rows = len(inputs.token_ids)
        if inputs.decodes is None or inputs.prefills or num_rows > MAX_THIN_ROWS:
            return None
        attention = self._make_attention(self._config, self._kv_cache, inputs.decodes)
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

    def _write(self, num_rows: int, attention: "PagedDecode") -> _Written:
        config, ops, layers = self._config, self._ops, self._model.weights.layers
        take = partial(self._workspace.take, num_rows=num_rows)
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        x, y = take("x", size=config.hidden_size), take("y", size=config.hidden_size)
        qkv = take("qkv", size=q_size + 2 * kv_size)
        q, kv = take("q", size=q_size), take("kv", size=2 * kv_size)
        attended = take("attended", size=q_size)
        gate_up = take("gate_up", size=2 * config.intermediate_size)
        gated = take("gated", size=config.intermediate_size)
        slot_rows = take("slot_rows", size=2 * config.num_kv_heads, dtype=torch.int64).view(-1)
        rotations = {
            rope: Rotation(
                *(take(f"{part} {i}", size=config.head_dim // 2) for part in ("cos", "sin"))
            )
            for i, rope in enumerate(dict.fromkeys(layer.rope for layer in config.layers))
        }
        calls: list[Call] = []
        attends: dict[int | None, list[int]] = defaultdict(list)

        def multiply(linear: Linear, x: Tensor, y: Tensor) -> None:
            assert isinstance(linear, CompiledLinear)
            calls.extend(linear.calls(x, y, self._workspace))

        calls.append(ops.norm(x, layers[0].input_norm, y))
        for index, layer in enumerate(layers):
            place = config.layers[index]
            multiply(layer.qkv, y, qkv)
            calls.append(ops.rotate(qkv, *rotations[place.rope], layer.q_norm, layer.k_norm, q, kv))
            calls.append(self._access.write_call(index, slot_rows, kv))
            attends[place.sliding_window].append(len(calls))
            calls.append(attention.call(index, q, attended))
            multiply(layer.output, attended, y)
            calls.append(ops.add_norm(x, y, layer.post_attention_norm, layer.mlp_norm, y))
            multiply(layer.gate_up, y, gate_up)
            calls.append(ops.gate(gate_up, gated))
            multiply(layer.down, gated, y)
            last = index + 1 == len(layers)
            norm = None if last else layers[index + 1].input_norm
            calls.append(ops.add_norm(x, y, layer.post_mlp_norm, norm, y))
        program = self._make_program(calls)
        where = {window: np.array(indices) for window, indices in attends.items()}
        return _Written(program, x, rotations, slot_rows, where)
