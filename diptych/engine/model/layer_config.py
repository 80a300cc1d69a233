"""What may differ from layer to layer of a decoder. Immutable; no torch."""

import enum
from dataclasses import dataclass


class Activation(enum.Enum):
    """Of the gated feed-forward part."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"


class RopeType(enum.Enum):
    """How rotary frequencies are stretched."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One set of rotary frequencies. Positions in tokens."""

    theta: float
    rope_type: RopeType = RopeType.DEFAULT
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    # YaRN: waves of more turns than beta_fast in the original context are kept, those of
    # fewer than beta_slow stretched; truncate: at whole numbers of dimensions.
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # of cosines and sines


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What may differ from layer to layer."""

    rope: RopeConfig
    sliding_window: int | None  # a token sees itself and window - 1 before it
