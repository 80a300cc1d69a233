"""The layers of a decoder, described once: which operation comes after which, on what.

Whatever follows the description (at once, into a program, into a graph) brings the
operations and the memory. Every operation writes into memory that it is given, so that a
description that was followed once may be run again on other inputs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from diptych.engine.model.config import ModelConfig
from diptych.engine.model.layer_config import RopeConfig
from diptych.engine.model.parts import AttentionStep, LayerOps, Rotation, Rows
from diptych.engine.model.weights import LayerWeights


@dataclass(frozen=True, slots=True)
class LayerBuffers:
    """What lies between a layer's operations, of N rows; the same for all layers. Contiguous."""

    y: Tensor  # [N, hidden_size], into and out of a layer's two parts
    qkv: Tensor  # [N, (num_heads + 2 * num_kv_heads) * head_dim]
    q: Tensor  # [N, num_heads, head_dim]
    kv: Tensor  # [N, 2, num_kv_heads, head_dim]
    attended: Tensor  # [N, num_heads, head_dim]
    gate_up: Tensor  # [N, 2 * intermediate_size]
    gated: Tensor  # [N, intermediate_size]

    @classmethod
    def of(cls, config: ModelConfig, take: Callable[[str, int], Tensor]) -> Self:
        """take: memory by name and size of a row, [N, size]."""
        num_heads, num_kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        return cls(
            y=take("y", config.hidden_size),
            qkv=take("qkv", (num_heads + 2 * num_kv_heads) * head_dim),
            q=take("q", num_heads * head_dim).view(-1, num_heads, head_dim),
            kv=take("kv", 2 * num_kv_heads * head_dim).view(-1, 2, num_kv_heads, head_dim),
            attended=take("attended", num_heads * head_dim).view(-1, num_heads, head_dim),
            gate_up=take("gate_up", 2 * config.intermediate_size),
            gated=take("gated", config.intermediate_size),
        )

    def only(self, rows: Tensor) -> Self:
        """Of these rows; of all but what was attended the memory alone. rows: [R] int64."""
        num_rows = len(rows)
        return type(self)(
            y=self.y[:num_rows],
            qkv=self.qkv[:num_rows],
            q=self.q[:num_rows],
            kv=self.kv[:num_rows],
            attended=self.attended.index_select(0, rows),
            gate_up=self.gate_up[:num_rows],
            gated=self.gated[:num_rows],
        )


def run_layers(
    config: ModelConfig,
    layers: Sequence[LayerWeights],
    ops: LayerOps,
    attention: AttentionStep,
    rotations: Mapping[RopeConfig, Rotation],
    x: Tensor,
    buffers: LayerBuffers,
    rows: Rows | None = None,
) -> Tensor:
    """Follow the description. Returns the hidden states before the last norm: x itself.

    x: [N, hidden_size], the embeddings; it is overwritten. rows: [R], the only ones that
    are wanted, as new memory [R, hidden_size]; from its attention on, the last layer
    computes no others before the first of a chunk.
    """
    ops.norm(x, layers[0].input_norm, buffers.y)
    for index, layer in enumerate(layers):
        is_last = index + 1 == len(layers)
        rotation = rotations[config.layers[index].rope]
        ops.multiply(layer.qkv, buffers.y, buffers.qkv)
        ops.rotate(buffers.qkv, rotation, layer.q_norm, layer.k_norm, buffers.q, buffers.kv)
        attention(index, buffers.q, buffers.kv, buffers.attended, rows if is_last else None)
        if rows is not None and is_last:
            wanted = torch.from_numpy(rows).to(x.device, non_blocking=True)
            x, buffers = x.index_select(0, wanted), buffers.only(wanted)
            if not len(wanted):
                break
        y = buffers.y
        ops.multiply(layer.output, buffers.attended.flatten(1), y)
        ops.add_norm(x, y, layer.post_attention_norm, layer.mlp_norm, y)
        ops.multiply_gated(layer.gate_up, y, buffers.gate_up, buffers.gated)
        ops.multiply(layer.down, buffers.gated, y)
        next_norm = None if is_last else layers[index + 1].input_norm
        ops.add_norm(x, y, layer.post_mlp_norm, next_norm, y)
    return x
