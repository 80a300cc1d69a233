"""Shapes of real models, and decoders of them with random weights that were made on the device."""

from collections.abc import Mapping
from typing import Any

import torch

from diptych.engine.backends.base import Backend
from diptych.engine.model.config import ModelConfig
from diptych.engine.model.decoder import Decoder
from diptych.engine.model.parts import Linear
from diptych.engine.model.weights import DecoderWeights, LayerWeights
from diptych.formats import Quantization

_GEMMA3_4B = {
    "model_type": "gemma3_text",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 1024,
}
_GEMMA2_2B = {
    "model_type": "gemma2",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
}
_LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
_SMOL = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}
_QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
MODELS: Mapping[str, Mapping[str, Any]] = {  # entries of config.json; layers of each kind
    "SmolLM2-135M": _LLAMA | _SMOL,
    "Qwen3-0.6B": _LLAMA | _QWEN3,
    "Llama-3.1-8B": _LLAMA,
    "Gemma 3 4B": _GEMMA3_4B,
    "Gemma 2 2B": _GEMMA2_2B,
}


def random_decoder(
    config: ModelConfig, backend: Backend, dtype: torch.dtype, quantization: Quantization = "none"
) -> Decoder:
    """Without a file, so that a model of many GB is there in seconds. Of no biases."""
    store = backend.weights(dtype, quantization)
    generator = torch.Generator(backend.device).manual_seed(1)

    def matrix(num_rows: int, num_columns: int) -> torch.Tensor:
        weight = torch.empty(num_rows, num_columns, dtype=dtype, device=backend.device)
        return weight.normal_(0.0, num_columns**-0.5, generator=generator)

    def linear(num_columns: int, num_rows: int) -> Linear:
        return store.linear(matrix(num_rows, num_columns), None)

    def norm(size: int) -> torch.Tensor:
        return torch.ones(size, device=backend.device)

    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layers = tuple(
        LayerWeights(
            input_norm=norm(hidden),
            qkv=linear(hidden, q_size + 2 * kv_size),
            q_norm=norm(config.head_dim) if config.qk_norm else None,
            k_norm=norm(config.head_dim) if config.qk_norm else None,
            output=linear(q_size, hidden),
            post_attention_norm=norm(hidden) if config.post_norms else None,
            mlp_norm=norm(hidden),
            gate_up=linear(hidden, 2 * inner),
            down=linear(inner, hidden),
            post_mlp_norm=norm(hidden) if config.post_norms else None,
        )
        for _ in config.layers
    )
    embedding = matrix(config.vocab_size, hidden)
    tied = config.tied_embeddings
    weights = DecoderWeights(
        embedding=embedding,
        layers=layers,
        final_norm=norm(hidden),
        head=store.tied_head(embedding) if tied else linear(hidden, config.vocab_size),
        dtype=dtype,
    )
    return Decoder(config, weights, backend.layer_ops(config, dtype))
