"""Counts that a config may leave to transformers: routers and workers take the same. Pure."""

from collections.abc import Mapping
from typing import Any, Final

_COUNTS: Final[Mapping[str, Mapping[str, int]]] = {
    "gemma2": {
        "vocab_size": 256_000,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
    },
    "gemma3": {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
    },
}


def with_silent_counts(config: Mapping[str, Any]) -> dict[str, Any]:
    """With those that ``config`` does not have, or has as null.

    config: what ``config.json`` says of text.
    """
    family = str(config.get("model_type")).removesuffix("_text")
    counts = _COUNTS.get(family, {}).items()
    return {**config, **{key: count for key, count in counts if config.get(key) is None}}
