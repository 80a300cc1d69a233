"""The values of a checkpoint's ``config.json``, each checked; errors name its key. No torch."""

import math
import sys
from collections.abc import Mapping
from typing import Any

from diptych.engine.model.families import Family
from diptych.engine.model.layer_config import Activation, LayerConfig, RopeConfig, RopeType
from diptych.errors import ConfigurationError

_MAX_COUNT = 2**31 - 1  # sizes and positions are int32 in kernels and on the wire
_MAX_LAYERS = 10_000  # each is described before any weight is looked for
_ROPE_NUMBERS = (1e-12, 1e15)  # of any of these come angles that float32 has, at any position

_FULL, _SLIDING = "full_attention", "sliding_attention"


class ConfigReader:
    """Typed access to a config, or to a section of one.

    All methods raise ConfigurationError, which names the key and its value.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def number(
        self, key: str, default: float | None = None, *, zero_allowed: bool = False
    ) -> float:
        """A finite number; ``default``: where there is none, or null. None: there has to be one."""
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
        """The same of a whole number."""
        value = self.number(key, default, zero_allowed=zero_allowed)
        if value != int(value) or value > most:
            raise ConfigurationError(
                f"config.json: {key} must be a whole number, {most} at the most, is {value!r}"
            )
        return int(value)

    def rope_number(
        self, key: str, default: float | None = None, *, zero_allowed: bool = False
    ) -> float:
        """The same of one that angles are made of, or what they are weighed by."""
        value = self.number(key, default, zero_allowed=zero_allowed)
        least, most = _ROPE_NUMBERS
        if value and not least <= value <= most:
            raise ConfigurationError(
                f"config.json: {key}={value!r} is not from {least:g} to {most:g}"
            )
        return value

    def softcap(self, key: str, default: float | None) -> float | None:
        """What scores or logits are held under; None, as the config's null or 0: nothing."""
        if key not in self._config:
            return default
        return self.number(key, 0.0, zero_allowed=True) or None

    def activation(self, key: str, default: str) -> Activation:
        """One that the decoder has."""
        name = self._config.get(key) or default
        try:
            return Activation(name)
        except ValueError:
            raise ConfigurationError(f"config.json: {key}={name!r} is not supported") from None

    def layers(self, family: Family) -> tuple[LayerConfig, ...]:
        """All of them, from the first to the last."""
        num_layers = self.count("num_hidden_layers", most=_MAX_LAYERS)
        window = self._window(family)
        kinds = self._layer_types(family, num_layers, window)
        ropes = {kind: self._rope(family, kind) for kind in sorted(set(kinds))}
        return tuple(
            LayerConfig(rope=ropes[kind], sliding_window=window if kind == _SLIDING else None)
            for kind in kinds
        )

    def _window(self, family: Family) -> int | None:
        if family.window is None:
            return None
        if family.window_switch and not self._config.get("use_sliding_window"):
            return None
        if "sliding_window" in self._config and self._config["sliding_window"] is None:
            return None
        return self.count("sliding_window", family.window)

    def _layer_types(self, family: Family, num_layers: int, window: int | None) -> list[str]:
        # Llama has no such key; a Mistral that has it is what others call a Ministral.
        kinds = self._config.get("layer_types") if family.window is not None else None
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

    def _rope(self, family: Family, kind: str) -> RopeConfig:
        local = kind == _SLIDING and family.local_rope_theta is not None
        parameters = _section(self._config, "rope_parameters")
        # Scaling never applied to the local frequencies.
        older = {} if local else _section(self._config, "rope_scaling")
        if kind in parameters:  # transformers 5, one set per layer type
            parameters = _section(parameters, kind)
            self._refuse_two_ropes(family, parameters, older, of_type=True)
        elif family.local_rope_theta is not None and "rope_theta" in parameters:
            raise ConfigurationError("config.json: rope_parameters must name its layer types")
        else:
            self._refuse_two_ropes(family, parameters, older)
            parameters |= older
        theta_key = "rope_local_base_freq" if local else "rope_theta"
        default_theta = family.local_rope_theta if local else family.rope_theta
        scaling = ConfigReader(parameters)
        theta = scaling.rope_number("rope_theta", self.number(theta_key, default_theta))
        name = parameters.get("rope_type", parameters.get("type", "default"))
        try:
            rope_type = RopeType(name)
        except ValueError:
            raise ConfigurationError(f"config.json: rope_type={name!r} is not supported") from None
        for said_by in (parameters, self._config):
            if said_by.get("partial_rotary_factor") not in (None, 1.0):
                raise ConfigurationError("config.json: partial_rotary_factor is not supported")
        if rope_type is RopeType.DEFAULT:
            return RopeConfig(theta=theta)
        if rope_type is RopeType.LINEAR:
            return RopeConfig(theta, rope_type, scaling.rope_number("factor"))
        original = self._original_max_position(scaling)
        if rope_type is RopeType.YARN:
            return scaling.yarn(theta, original, self.max_position())
        factor = scaling.rope_number("factor")
        low, high = scaling.rope_number("low_freq_factor"), scaling.rope_number("high_freq_factor")
        if high <= low:
            raise ConfigurationError(
                f"config.json: high_freq_factor={high!r} is not above low_freq_factor={low!r}"
            )
        return RopeConfig(theta, rope_type, factor, low, high, original)

    def _refuse_two_ropes(
        self,
        family: Family,
        parameters: Mapping[str, Any],
        older: Mapping[str, Any],
        *,
        of_type: bool = False,
    ) -> None:
        """Where a config has both, transformers 5 takes the older one in place of the other.

        So that has to say all that the other says. of_type: and the other way round, as what is
        said of one type of layers is taken without the older one here.
        """
        if not older:
            return
        usual = {
            "rope_type": "default",
            "rope_theta": self.number("rope_theta", family.rope_theta),
            "partial_rotary_factor": 1.0,
        }
        ours, theirs = _spelled_now(parameters), _spelled_now(older)
        for key in ours | theirs if of_type else ours:
            values = [each.get(key, usual.get(key)) for each in (ours, theirs)]
            if values[0] != values[1]:
                raise ConfigurationError(
                    f"config.json: rope_parameters and rope_scaling differ in {key} "
                    f"({values[0]!r} and {values[1]!r}): remove one of them"
                )

    def max_position(self) -> int:
        """The longest sequence in tokens, as the model's own key says."""
        return self.count("max_position_embeddings")

    def _original_max_position(self, scaling: "ConfigReader") -> int:
        """The context before it was stretched; what the model says of it goes first."""
        key = "original_max_position_embeddings"
        said_by = self if self._config.get(key) is not None else scaling
        return said_by.count(key, self.max_position())

    def yarn(self, theta: float, original: int, max_position: int) -> RopeConfig:
        """The section of a YaRN scaling. original, max_position: contexts in tokens."""
        # A factor of null, which some models have, is that of their contexts.
        factor = self.rope_number(
            "factor", max_position / original if "factor" in self._config else None
        )
        beta_fast = self.rope_number("beta_fast", 32.0)
        beta_slow = self.rope_number("beta_slow", 1.0)
        for wrong, what in (
            (factor * original > _MAX_COUNT, f"factor={factor!r} stretches the context too far"),
            (beta_fast <= beta_slow, f"beta_fast={beta_fast!r} is not above {beta_slow=}"),
            (theta <= 1, f"rope_theta must be more than 1, is {theta!r}"),
        ):
            if wrong:
                raise ConfigurationError(f"config.json: {what}")
        mscale = self.rope_number("mscale", 0.0, zero_allowed=True)
        mscale_all_dim = self.rope_number("mscale_all_dim", 0.0, zero_allowed=True)
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
            attention_factor=self.rope_number("attention_factor", attention_factor),
        )


def _yarn_attention(factor: float, weight: float) -> float:
    """What YaRN multiplies cosines and sines by, so that attention stays as sharp."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _spelled_now(rope: Mapping[str, Any]) -> dict[str, Any]:
    """As transformers 5 spells it, without what is null."""
    now = {"rope_type": rope.get("type"), **rope}
    return {key: value for key, value in now.items() if key != "type" and value is not None}


def _section(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A copy of the object at ``key``; empty where there is none."""
    section = config.get(key) or {}
    if not isinstance(section, Mapping):
        raise ConfigurationError(f"config.json: {key} must be an object, is {section!r}")
    return dict(section)
