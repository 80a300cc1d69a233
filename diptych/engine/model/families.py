"""The model types that this decoder follows, by what they imply. Immutable; no torch."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """What a model type implies without saying it in its config."""

    qk_norm: bool = False
    qkv_bias: bool = False
    # Whether attention_bias (of all four projections) and mlp_bias mean anything in its config.
    heeds_attention_bias: bool = True
    heeds_mlp_bias: bool = False
    head_dim: int | None = None  # None: hidden_size / num_heads
    window: int | None = None  # where the config is silent
    window_switch: bool = False  # sliding only if use_sliding_window says so
    # Where the config has no layer_types: every n-th layer is full; None: all slide.
    window_pattern: int | None = None
    rope_theta: float = 10000.0
    local_rope_theta: float | None = None  # of sliding layers
    # Gemma's norms (of results too, with an offset), embeddings, gate and scale of products.
    is_gemma: bool = False
    # Where the config is silent; one that says null has none.
    score_softcap: float | None = None
    logit_softcap: float | None = None


FAMILIES: Mapping[str, Family] = {
    "llama": Family(heeds_mlp_bias=True),
    "mistral": Family(heeds_attention_bias=False, window=4096),
    "qwen2": Family(qkv_bias=True, heeds_attention_bias=False, window=4096, window_switch=True),
    "qwen3": Family(qk_norm=True, head_dim=128, window=4096, window_switch=True),
    "gemma2": Family(
        is_gemma=True,
        head_dim=256,
        window=4096,
        window_pattern=2,
        score_softcap=50.0,
        logit_softcap=30.0,
    ),
    "gemma3_text": Family(
        is_gemma=True,
        qk_norm=True,
        head_dim=256,
        window=4096,
        window_pattern=6,
        rope_theta=1_000_000.0,
        local_rope_theta=10_000.0,
    ),
}

# Models of text and images, and the family that their text part is of.
TEXT_TYPES: Mapping[str, str] = {"gemma3": "gemma3_text"}
