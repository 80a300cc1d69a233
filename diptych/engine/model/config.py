"""What a checkpoint's ``config.json`` says about its decoder, and nothing inferred.

Reads the spellings of transformers 4 and 5. Whatever would change the result and
is not understood here is refused by name. Immutable; no torch.
"""

import enum
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diptych.engine.model.kv_groups import KVGroup, group_layers, refuse_other_kinds
from diptych.engine.model.stored_format import Storage, read_storage
from diptych.errors import ConfigurationError

# Keys that switch on mathematics this decoder does not have; fine when falsy.
_UNSUPPORTED_SWITCHES = (
    "use_bidirectional_attention",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "num_experts",
    "num_local_experts",
)

_MAX_COUNT = 2**31 - 1  # sizes and positions are int32 in kernels and on the wire
_MAX_LAYERS = 10_000  # each is described before any weight is looked for


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The decoder's shape and variations."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int  # longest sequence in tokens
    rms_norm_eps: float
    activation: Activation
    tied_embeddings: bool
    embedding_scale: float  # of looked-up embeddings, rounded to the weights' dtype
    attention_scale: float  # of query-key products
    score_softcap: float | None  # scaled products come no further from zero, by a tanh
    qk_norm: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    norm_offset: float  # added to every norm's weight
    post_norms: bool  # norms after attention and feed-forward as well
    logit_softcap: float | None
    layers: tuple[LayerConfig, ...]
    checkpoint_dtype: str  # element type of the stored weights, float32 if unsaid
    storage: Storage | None  # linear layers are stored so; None: all weights are of that type
    is_text_part: bool  # the checkpoint has other parts as well, such as a vision tower

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """All layers, by what they keep of the past; in their order within a KV block."""
        windows = [layer.sliding_window for layer in self.layers]
        return group_layers(windows, self.num_kv_heads, self.head_dim)

    @classmethod
    def from_folder(cls, folder: Path | str) -> "ModelConfig":
        """Read ``config.json`` in ``folder``.

        Raises:
            ConfigurationError: missing, malformed, or a model we do not have.
        """
        path = Path(folder) / "config.json"
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"cannot read {path}: {error}") from error
        if not isinstance(content, dict):
            raise ConfigurationError(f"{path} is not a JSON object")
        return cls.from_hf(content)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Read the content of a Hugging Face ``config.json``.

        Raises:
            ConfigurationError: names the key and value it cannot follow.
        """
        is_text_part = config.get("model_type") in _TEXT_TYPES
        if is_text_part:
            config = _text_part(config)
        refuse_other_kinds(config)
        model_type = config.get("model_type")
        if not isinstance(model_type, str) or model_type not in _FAMILIES:
            names = ", ".join(sorted({*_FAMILIES, *_TEXT_TYPES}))
            raise ConfigurationError(f"model_type {model_type!r} is not supported; have {names}")
        family = _FAMILIES[model_type]
        for key in _UNSUPPORTED_SWITCHES:
            if config.get(key):
                raise ConfigurationError(f"config.json: {key}={config[key]!r} is not supported")
        reader = _Reader(config)
        layers = reader.layers(family)
        gemma = family.is_gemma
        num_heads = reader.count("num_attention_heads", family.num_heads)
        num_kv_heads = reader.count("num_key_value_heads", family.num_kv_heads or num_heads)
        if num_heads % num_kv_heads:
            raise ConfigurationError(
                f"config.json: {num_heads} heads cannot share {num_kv_heads} key-value heads"
            )
        hidden_size = reader.count("hidden_size")
        head_dim = reader.count("head_dim", family.head_dim or hidden_size // num_heads)
        attention_bias = bool(config.get("attention_bias"))
        scalar = reader.number("query_pre_attn_scalar", 256) if gemma else head_dim
        score_softcap = reader.softcap("attn_logit_softcapping", family.score_softcap)
        if score_softcap is not None and family.score_softcap is None:
            raise ConfigurationError(
                f"config.json: attn_logit_softcapping={score_softcap!r} is not supported "
                f"of {model_type}"
            )
        return cls(
            model_type=model_type,
            vocab_size=reader.count("vocab_size", family.vocab_size),
            hidden_size=hidden_size,
            intermediate_size=reader.count("intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position=max(reader.max_position(family), *map(_yarn_context, layers)),
            rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
            activation=reader.activation(
                "hidden_activation" if gemma else "hidden_act",
                "gelu_pytorch_tanh" if gemma else "silu",
            ),
            tied_embeddings=bool(config.get("tie_word_embeddings", gemma)),
            embedding_scale=hidden_size**0.5 if gemma else 1.0,
            attention_scale=scalar**-0.5,
            score_softcap=score_softcap,
            qk_norm=family.qk_norm,
            qkv_bias=attention_bias or family.qkv_bias,
            output_bias=attention_bias,
            mlp_bias=bool(config.get("mlp_bias")),
            norm_offset=1.0 if gemma else 0.0,
            post_norms=gemma,
            logit_softcap=reader.softcap("final_logit_softcapping", family.logit_softcap),
            layers=layers,
            checkpoint_dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
            storage=read_storage(config),
            is_text_part=is_text_part,
        )


@dataclass(frozen=True, slots=True)
class _Family:
    """What a model type implies without saying it in its config."""

    qk_norm: bool = False
    qkv_bias: bool = False
    head_dim: int | None = None  # None: hidden_size / num_heads
    window: int | None = None  # where the config is silent
    window_switch: bool = False  # sliding only if use_sliding_window says so
    window_pattern: int | None = None  # every n-th layer is full; None: all slide
    rope_theta: float = 10000.0
    local_rope_theta: float | None = None  # of sliding layers
    # Gemma's norms (of results too, with an offset), embeddings, gate and scale of products.
    is_gemma: bool = False
    # Where the config is silent; one that says null has none.
    score_softcap: float | None = None
    logit_softcap: float | None = None
    # Counts of models whose config leaves them to transformers; None: they must be there.
    vocab_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None  # None: as many as heads
    max_position: int | None = None


_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(),
    "mistral": _Family(window=4096),
    "qwen2": _Family(qkv_bias=True, window=4096, window_switch=True),
    "qwen3": _Family(qk_norm=True, head_dim=128, window=4096, window_switch=True),
    "gemma2": _Family(
        is_gemma=True,
        head_dim=256,
        window=4096,
        window_pattern=2,
        score_softcap=50.0,
        logit_softcap=30.0,
        vocab_size=256_000,
        num_heads=8,
        num_kv_heads=4,
        max_position=8192,
    ),
    "gemma3_text": _Family(
        is_gemma=True,
        qk_norm=True,
        head_dim=256,
        window=4096,
        window_pattern=6,
        rope_theta=1_000_000.0,
        local_rope_theta=10_000.0,
        vocab_size=262_208,
        num_heads=8,
        num_kv_heads=4,
        max_position=131_072,
    ),
}

# Models of text and images, and the family that their text part is of.
_TEXT_TYPES: Mapping[str, str] = {"gemma3": "gemma3_text"}
# What such a config says of all its parts, where the text part is silent.
_SHARED_KEYS = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config")

_FULL, _SLIDING = "full_attention", "sliding_attention"


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text part of such a model, as a config of its own."""
    part = config.get("text_config")
    if not isinstance(part, Mapping):
        raise ConfigurationError(f"config.json: text_config must be an object, is {part!r}")
    shared = {key: config[key] for key in _SHARED_KEYS if key in config}
    return shared | {"model_type": _TEXT_TYPES[config["model_type"]], **part}


class _Reader:
    """Typed access to the config with errors that name the key."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def number(
        self, key: str, default: float | None = None, *, zero_allowed: bool = False
    ) -> float:
        value = self._config.get(key)
        value = default if value is None else value
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 <= value <= sys.float_info.max  # false of NaN too
            or (value == 0 and not zero_allowed)
        ):
            raise ConfigurationError(f"config.json: {key} must be a positive number, is {value!r}")
        return float(value)

    def count(
        self,
        key: str,
        default: int | None = None,
        *,
        zero_allowed: bool = False,
        most: int = _MAX_COUNT,
    ) -> int:
        value = self.number(key, default, zero_allowed=zero_allowed)
        if value != int(value) or value > most:
            raise ConfigurationError(
                f"config.json: {key} must be a whole number, {most} at the most, is {value!r}"
            )
        return int(value)

    def softcap(self, key: str, default: float | None) -> float | None:
        if key not in self._config:
            return default
        return self.number(key, 0.0, zero_allowed=True) or None

    def activation(self, key: str, default: str) -> Activation:
        name = self._config.get(key) or default
        try:
            return Activation(name)
        except ValueError:
            raise ConfigurationError(f"config.json: {key}={name!r} is not supported") from None

    def layers(self, family: _Family) -> tuple[LayerConfig, ...]:
        num_layers = self.count("num_hidden_layers", most=_MAX_LAYERS)
        window = self._window(family)
        kinds = self._layer_types(family, num_layers, window)
        ropes = {kind: self._rope(family, kind) for kind in sorted(set(kinds))}
        return tuple(
            LayerConfig(rope=ropes[kind], sliding_window=window if kind == _SLIDING else None)
            for kind in kinds
        )

    def _window(self, family: _Family) -> int | None:
        if family.window is None:
            return None
        if family.window_switch and not self._config.get("use_sliding_window"):
            return None
        if "sliding_window" in self._config and self._config["sliding_window"] is None:
            return None
        return self.count("sliding_window", family.window)

    def _layer_types(self, family: _Family, num_layers: int, window: int | None) -> list[str]:
        # Llama has no such key and Mistral slides in every layer whatever it says.
        has_types = family.window_switch or family.window_pattern is not None
        kinds = self._config.get("layer_types") if has_types else None
        if kinds is not None:
            are_known = isinstance(kinds, list) and all(kind in (_FULL, _SLIDING) for kind in kinds)
            if not are_known or len(kinds) != num_layers:
                raise ConfigurationError(f"config.json: layer_types={kinds!r} is not supported")
            if window is None and _SLIDING in kinds:
                raise ConfigurationError("config.json: sliding layers without sliding_window")
            return list(kinds)
        if window is None:
            return [_FULL] * num_layers
        if family.window_switch:
            first = self.count("max_window_layers", 28, zero_allowed=True)
            return [_SLIDING if index >= first else _FULL for index in range(num_layers)]
        if family.window_pattern is None:
            return [_SLIDING] * num_layers
        period = self.count("sliding_window_pattern", family.window_pattern)
        return [_SLIDING if (i + 1) % period else _FULL for i in range(num_layers)]

    def _rope(self, family: _Family, kind: str) -> RopeConfig:
        local = kind == _SLIDING and family.local_rope_theta is not None
        parameters = _section(self._config, "rope_parameters")
        if kind in parameters:  # transformers 5, one set per layer type
            parameters = _section(parameters, kind)
        elif family.local_rope_theta is not None and "rope_theta" in parameters:
            raise ConfigurationError("config.json: rope_parameters must name its layer types")
        elif not local:  # scaling never applied to the local frequencies
            parameters |= _section(self._config, "rope_scaling")
        theta_key = "rope_local_base_freq" if local else "rope_theta"
        default_theta = family.local_rope_theta if local else family.rope_theta
        scaling = _Reader(parameters)
        theta = scaling.number("rope_theta", self.number(theta_key, default_theta))
        name = parameters.get("rope_type", parameters.get("type", "default"))
        try:
            rope_type = RopeType(name)
        except ValueError:
            raise ConfigurationError(f"config.json: rope_type={name!r} is not supported") from None
        if parameters.get("partial_rotary_factor", 1.0) != 1.0:
            raise ConfigurationError("config.json: partial_rotary_factor is not supported")
        if rope_type is RopeType.DEFAULT:
            return RopeConfig(theta=theta)
        if rope_type is RopeType.LINEAR:
            return RopeConfig(theta, rope_type, scaling.number("factor"))
        original = self._original_max_position(family, scaling)
        if rope_type is RopeType.YARN:
            return scaling.yarn(theta, original, self.max_position(family))
        return RopeConfig(
            theta,
            rope_type,
            scaling.number("factor"),
            scaling.number("low_freq_factor"),
            scaling.number("high_freq_factor"),
            original,
        )

    def max_position(self, family: _Family) -> int:
        return self.count("max_position_embeddings", family.max_position)

    def _original_max_position(self, family: _Family, scaling: "_Reader") -> int:
        """The context before it was stretched; what the model says of it goes first."""
        key = "original_max_position_embeddings"
        said_by = self if self._config.get(key) is not None else scaling
        return said_by.count(key, self.max_position(family))

    def yarn(self, theta: float, original: int, max_position: int) -> RopeConfig:
        """The section of a YaRN scaling. original, max_position: contexts in tokens."""
        # A factor of null, which some models have, is that of their contexts.
        factor = self.number(
            "factor", max_position / original if "factor" in self._config else None
        )
        beta_fast, beta_slow = self.number("beta_fast", 32.0), self.number("beta_slow", 1.0)
        for wrong, what in (
            (factor * original > _MAX_COUNT, f"factor={factor!r} stretches the context too far"),
            (beta_fast <= beta_slow, f"beta_fast={beta_fast!r} is not above {beta_slow=}"),
            (theta <= 1, f"rope_theta must be more than 1, is {theta!r}"),
        ):
            if wrong:
                raise ConfigurationError(f"config.json: {what}")
        mscale = self.number("mscale", 0.0, zero_allowed=True)
        mscale_all_dim = self.number("mscale_all_dim", 0.0, zero_allowed=True)
        attention_factor = _yarn_attention(factor, 1.0)
        if mscale and mscale_all_dim:
            attention_factor = _yarn_attention(factor, mscale)
            attention_factor /= _yarn_attention(factor, mscale_all_dim)
        truncate = self._config.get("truncate", True)
        if not isinstance(truncate, bool):
            raise ConfigurationError(f"config.json: truncate must be a boolean, is {truncate!r}")
        return RopeConfig(
            theta,
            RopeType.YARN,
            factor,
            original_max_position=original,
            beta_fast=beta_fast,
            beta_slow=beta_slow,
            truncate=truncate,
            attention_factor=self.number("attention_factor", attention_factor),
        )


def _yarn_attention(factor: float, weight: float) -> float:
    """What YaRN multiplies cosines and sines by, so that attention stays as sharp."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn_context(layer: LayerConfig) -> int:
    """Tokens that a layer's YaRN stretches the context to, whatever the model's own key says."""
    rope = layer.rope
    return int(rope.factor * rope.original_max_position) if rope.rope_type is RopeType.YARN else 0


def _section(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A copy of the object at ``key``; empty where there is none."""
    section = config.get(key) or {}
    if not isinstance(section, Mapping):
        raise ConfigurationError(f"config.json: {key} must be an object, is {section!r}")
    return dict(section)
