"""The decoder: token ids in, hidden states and logits out.

One class for every family; what differs is read from :class:`ModelConfig`. Holds
the weights, which never change; all state (the KV cache) is behind the attention
step it is given. Called on the model thread only.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from diptych.engine.backends.cpu.attention import AttentionStep
from diptych.engine.backends.cpu.layer_ops import Rotation, make_layer_ops
from diptych.engine.inputs import StepInputs
from diptych.engine.model.config import ModelConfig, RopeConfig, RopeType
from diptych.engine.model.weights import DecoderWeights


class Decoder:
    """A decoder-only transformer over flat batches of N tokens."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        self.config = config
        self.weights = weights
        device = weights.embedding.device
        # Rounded to the element type first, as checkpoints were trained.
        self._embedding_scale = torch.tensor(
            config.embedding_scale, dtype=weights.dtype, device=device
        )
        self._frequencies = {
            rope: rope_frequencies(rope, config.head_dim).to(device)
            for rope in {layer.rope for layer in config.layers}
        }
        self.ops = make_layer_ops(config, weights.dtype, device)

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.dtype

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device

    def forward(
        self, inputs: StepInputs, attention: AttentionStep, rows: Tensor | None = None
    ) -> Tensor:
        """Run every layer. Returns hidden states before the last norm, [N, hidden_size].

        rows: [R] int64, the only ones that are wanted: [R, hidden_size]. From its
        attention on, the last layer computes no others before the first of a chunk.
        """
        config, ops, layers = self.config, self.ops, self.weights.layers
        rotations = self.rotations(inputs.positions)
        x = self.embed(inputs.token_ids)
        y = ops.norm(x, layers[0].input_norm)
        for index, layer in enumerate(layers):
            q, kv = ops.rotate(
                layer.qkv(y), rotations[config.layers[index].rope], layer.q_norm, layer.k_norm
            )
            is_last = index + 1 == len(layers)
            attended = attention(index, q, kv, rows if is_last else None)
            if rows is not None and is_last:
                x, attended = x.index_select(0, rows), attended.index_select(0, rows)
                if not len(rows):
                    break
            y = layer.output(attended)
            y = ops.add_norm(x, y, layer.post_attention_norm, layer.mlp_norm)
            y = layer.down(ops.gate(layer.gate_up(y)))
            if is_last:
                ops.add(x, y, layer.post_mlp_norm)
            else:
                y = ops.add_norm(x, y, layer.post_mlp_norm, layers[index + 1].input_norm)
        return x

    def embed(self, token_ids: Tensor) -> Tensor:
        """What goes into the first layer. token_ids: [N] -> [N, hidden_size]."""
        x = F.embedding(token_ids, self.weights.embedding)
        return x if self.config.embedding_scale == 1.0 else x.mul_(self._embedding_scale)

    def rotations(self, positions: Tensor) -> dict[RopeConfig, Rotation]:
        """Those of all layers. positions: [N]."""
        return {
            rope: Rotation.at(positions, frequencies)
            for rope, frequencies in self._frequencies.items()
        }

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token. hidden: [R, hidden_size] -> [R, vocab_size] float32."""
        scores = self.weights.head(self.ops.norm(hidden, self.weights.final_norm)).float()
        cap = self.config.logit_softcap
        return scores if cap is None else torch.tanh(scores / cap) * cap


def rope_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Angle per position of each pair of dimensions: [head_dim / 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies: Tensor = 1.0 / rope.theta**exponents
    if rope.rope_type is RopeType.LINEAR:
        return frequencies / rope.factor
    if rope.rope_type is RopeType.LLAMA3:
        # Long waves are stretched by the factor, short ones kept, those between blended
        # (Llama 3.1's rule).
        turns = rope.original_max_position * frequencies / (2 * torch.pi)
        span = rope.high_freq_factor - rope.low_freq_factor
        kept = ((turns - rope.low_freq_factor) / span).clamp(0, 1)
        return frequencies * kept + frequencies / rope.factor * (1 - kept)
    return frequencies
