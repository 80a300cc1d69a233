"""How long a model's sequences may be: routers and workers go by the same number. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from diptych.errors import ConfigurationError

_ORIGINAL = "original_max_position_embeddings"
_MAX_POSITION = 2**31 - 1  # positions are int32 in every engine


def context_length(config: Mapping[str, Any], max_position: int) -> int:
    """Tokens of the longest sequence: ``max_position``, or more where YaRN stretches the context.

    config: what ``config.json`` says of text; max_position: its ``max_position_embeddings``.
    Raises ConfigurationError.
    """
    stretched = (_stretched(config, each, max_position) for each in _rope_sections(config))
    return max(max_position, *stretched)


def _rope_sections(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """One set of parameters, or one for each type of layers."""
    parameters, scaling = _section(config, "rope_parameters"), _section(config, "rope_scaling")
    of_types = [each for each in parameters.values() if isinstance(each, Mapping)]
    yield from of_types or [{**parameters, **scaling}]


def _section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    section = config.get(key) or {}
    if not isinstance(section, Mapping):
        raise ConfigurationError(f"config.json: {key} must be an object, is {section!r}")
    return section


def _stretched(config: Mapping[str, Any], rope: Mapping[str, Any], max_position: int) -> int:
    factor = rope.get("factor")
    if rope.get("rope_type", rope.get("type")) != "yarn" or factor is None:
        return 0  # a factor of null is that of the contexts which are said
    said = [each.get(_ORIGINAL) for each in (config, rope)]
    original = next((each for each in said if each is not None), max_position)
    are_numbers = isinstance(factor, int | float) and isinstance(original, int | float)
    if not (are_numbers and 0 < factor * original <= _MAX_POSITION):
        raise ConfigurationError(
            f"config.json: YaRN's {factor=} of {original!r} tokens is no length of a context"
        )
    return int(factor * original)
