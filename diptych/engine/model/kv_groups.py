"""Groups of layers that keep the same kind of state of a sequence. Pure; no torch.

Within a KV block the groups lie one after another, those first that need the most of the
past: what a block must hold for a token far behind it is then always its first bytes.
"""

import enum
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diptych.errors import ConfigurationError


class KVKind(enum.Enum):
    """What a layer keeps of the tokens so far."""

    FULL = "full"  # the keys and values of all
    SLIDING = "sliding"  # those of the last ones, its window
    LATENT = "latent"  # one compressed row for each; no decoder here has it yet
    RECURRENT = "recurrent"  # one state, however many they are; nor this


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose state has one kind, one reach and one shape."""

    kind: KVKind
    window: int | None  # a token sees itself and window - 1 before it; None: all
    layers: tuple[int, ...]  # their indices in the model, ascending; never empty
    num_kv_heads: int
    head_dim: int


# Keys of a config.json that say of a model that it needs state of another kind.
_KIND_OF_KEY: Mapping[str, KVKind] = {
    "kv_lora_rank": KVKind.LATENT,
    "linear_num_key_heads": KVKind.RECURRENT,
    "lru_width": KVKind.RECURRENT,
    "mamba_d_state": KVKind.RECURRENT,
    "ssm_state_size": KVKind.RECURRENT,
}
_RECURRENT_LAYER_TYPES = ("linear_attention", "mamba", "recurrent")


def group_layers(
    windows: Sequence[int | None], num_kv_heads: int, head_dim: int
) -> tuple[KVGroup, ...]:
    """The groups of a decoder, by its layers' windows; in their order within a block."""
    layers = defaultdict[int | None, list[int]](list)
    for layer, window in enumerate(windows):
        layers[window].append(layer)
    ordered = sorted(layers, key=lambda window: -math.inf if window is None else -window)
    return tuple(
        KVGroup(
            kind=KVKind.FULL if window is None else KVKind.SLIDING,
            window=window,
            layers=tuple(layers[window]),
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )
        for window in ordered
    )


def refuse_other_kinds(config: Mapping[str, Any]) -> None:
    """Raise ConfigurationError if a ``config.json`` needs state that no group here can be."""
    asked = [(key, config[key], kind) for key, kind in _KIND_OF_KEY.items() if config.get(key)]
    types = config.get("layer_types")
    if isinstance(types, list):
        recurrent = [name for name in types if name in _RECURRENT_LAYER_TYPES]
        asked += [("layer_types", name, KVKind.RECURRENT) for name in recurrent]
    for key, value, kind in asked:
        raise ConfigurationError(
            f"config.json: {key}={value!r} is a model with {kind.value} state in its KV cache, "
            "which is not supported"
        )
