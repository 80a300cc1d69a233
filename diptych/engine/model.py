"""The decoder: token ids in, hidden states and logits out.

One class for every family; what differs is read from :class:`ModelConfig`. Holds
the weights, which never change; all state (the KV cache) is behind the attention
step it is given. Called on the model thread only.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from diptych.engine.attention import AttentionStep
from diptych.engine.inputs import StepInputs
from diptych.engine.model_config import Activation, ModelConfig, RopeConfig, RopeType
from diptych.engine.weights import DecoderWeights, LayerWeights


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

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.dtype

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device

    def forward(self, inputs: StepInputs, attention: AttentionStep) -> Tensor:
        """Run every layer. Returns hidden states before the last norm, [N, hidden_size]."""
        config, weights = self.config, self.weights
        rotations = {
            rope: _Rotation(frequencies, inputs.positions, self.dtype)
            for rope, frequencies in self._frequencies.items()
        }
        x = F.embedding(inputs.token_ids, weights.embedding)
        if config.embedding_scale != 1.0:
            x = x * self._embedding_scale
        for index, layer in enumerate(weights.layers):
            rotation = rotations[config.layers[index].rope]
            y = self._norm(x, layer.input_norm)
            y = self._attend(index, layer, y, rotation, attention)
            if layer.post_attention_norm is not None:
                y = self._norm(y, layer.post_attention_norm)
            x = x + y
            y = self._feed_forward(layer, self._norm(x, layer.mlp_norm))
            if layer.post_mlp_norm is not None:
                y = self._norm(y, layer.post_mlp_norm)
            x = x + y
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token. hidden: [R, hidden_size] -> [R, vocab_size] float32."""
        scores = self.weights.head(self._norm(hidden, self.weights.final_norm)).float()
        cap = self.config.logit_softcap
        return scores if cap is None else torch.tanh(scores / cap) * cap

    def _attend(
        self,
        index: int,
        layer: LayerWeights,
        x: Tensor,
        rotation: "_Rotation",
        attention: AttentionStep,
    ) -> Tensor:
        num_heads, num_kv_heads = self.config.num_heads, self.config.num_kv_heads
        qkv = layer.qkv(x).view(len(x), num_heads + 2 * num_kv_heads, self.config.head_dim)
        num_rotated = num_heads + num_kv_heads
        if layer.q_norm is not None and layer.k_norm is not None:
            q = self._norm(qkv[:, :num_heads], layer.q_norm)
            k = self._norm(qkv[:, num_heads:num_rotated], layer.k_norm)
            rotated = rotation(torch.cat((q, k), 1))
        else:
            rotated = rotation(qkv[:, :num_rotated])
        kv = torch.stack((rotated[:, num_heads:], qkv[:, num_rotated:]), 1)
        return layer.output(attention(index, rotated[:, :num_heads], kv))

    def _feed_forward(self, layer: LayerWeights, x: Tensor) -> Tensor:
        gate, up = layer.gate_up(x).chunk(2, dim=-1)
        if self.config.activation is Activation.SILU:
            return layer.down(F.silu(gate).mul_(up))
        return layer.down(F.gelu(gate, approximate="tanh").mul_(up))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        normed = F.rms_norm(x.float(), weight.shape, weight, self.config.rms_norm_eps)
        return normed.to(self.dtype)


class _Rotation:
    """Rotary position embedding at the positions of one step."""

    def __init__(self, frequencies: Tensor, positions: Tensor, dtype: torch.dtype) -> None:
        angles = positions.float()[:, None] * frequencies  # [N, head_dim / 2]
        cos, sin = angles.cos(), angles.sin()
        self._cos = torch.cat((cos, cos), 1)[:, None].to(dtype)  # [N, 1, head_dim]
        self._sin = torch.cat((-sin, sin), 1)[:, None].to(dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [N, heads, head_dim]; its two halves are the pairs' first and second parts."""
        first, second = x.chunk(2, dim=-1)
        return torch.addcmul(x * self._cos, torch.cat((second, first), -1), self._sin)


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
