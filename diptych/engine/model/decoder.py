"""The decoder: token ids in, hidden states and logits out.

One class for every family; what differs is read from :class:`ModelConfig`. Holds
the weights, which never change; all state (the KV cache) is behind the attention
step it is given. Called on the model thread only.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from diptych.engine.inputs import StepInputs
from diptych.engine.model.config import ModelConfig
from diptych.engine.model.layer_config import RopeConfig
from diptych.engine.model.layers import LayerBuffers, run_layers
from diptych.engine.model.parts import Attention, LayerOps, Rotation, Rows
from diptych.engine.model.ranks import look_up
from diptych.engine.model.rope import rope_frequencies
from diptych.engine.model.weights import DecoderWeights

Take = Callable[[str, int, int], Tensor]  # memory by name, rows and size of a row: [rows, size]


class Decoder:
    """A decoder-only transformer over flat batches of N tokens."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, ops: LayerOps) -> None:
        """The weights and the operations must be one backend's.

        config: of what is computed here, where the weights are a rank's part.
        """
        self.config = config
        self.weights = weights
        self.ops = ops
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

    def forward(
        self,
        inputs: StepInputs,
        attention: Attention,
        rows: Rows | None = None,
        take: Take | None = None,
    ) -> Tensor:
        """Run every layer, one operation after another.

        take: memory by name, rows and size of a row; None: new memory.
        Returns hidden states before the last norm, [N, hidden_size]; rows: [R], the only
        ones that are wanted: [R, hidden_size], new memory.
        """
        x = self.embed(inputs.token_ids)
        num_rows = len(x)
        if take is None:
            buffers = LayerBuffers.of(self.config, lambda _, size: x.new_empty(num_rows, size))
        else:
            buffers = LayerBuffers.of(self.config, lambda name, size: take(name, num_rows, size))
            x = take("x", *x.shape).copy_(x)
        rotations = self.rotations(inputs.positions)
        step = attention.begin_step(inputs)
        layers = self.weights.layers
        return run_layers(self.config, layers, self.ops, step, rotations, x, buffers, rows)

    def embed(self, token_ids: Tensor) -> Tensor:
        """What goes into the first layer. token_ids: [N] -> [N, hidden_size]."""
        x = look_up(token_ids, self.weights.embedding, self.weights.ranks)
        return x if self.config.embedding_scale == 1.0 else x.mul_(self._embedding_scale)

    def rotations(self, positions: Tensor) -> dict[RopeConfig, Rotation]:
        """Those of all layers. positions: [N]."""
        return {
            rope: Rotation.at(positions, frequencies, rope.attention_factor)
            for rope, frequencies in self._frequencies.items()
        }

    def normed(self, hidden: Tensor) -> Tensor:
        """Behind the last norm. hidden: [R, hidden_size], as is what is returned."""
        normed = torch.empty_like(hidden)
        self.ops.norm(hidden, self.weights.final_norm, normed)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token. hidden: [R, hidden_size] -> [R, vocab_size] float32.

        Of several ranks in the first one alone: the others get [0, vocab_size].
        """
        scores = self.ops.multiply(self.weights.head, self.normed(hidden)).float()
        cap = self.config.logit_softcap
        return scores if cap is None else torch.tanh(scores / cap) * cap


class EagerPass:
    """Runs a model's operations one after another. Implements ``ForwardPass``."""

    def __init__(self, model: Decoder, attention: Attention, take: Take | None = None) -> None:
        """attention: on the cache that is written; take: memory that lasts for a step."""
        self._model, self._attention, self._take = model, attention, take

    def __call__(self, inputs: StepInputs, rows: Rows) -> Tensor:
        return self._model.forward(inputs, self._attention, rows, self._take)
