"""The sampling parameters as members of a JSON body, made from their one declaration. Pure.

What :mod:`diptych.sampling_params` declares a client may say over HTTP under the same
name; a parameter that is added there is read here without a change. Types are checked
here, ranges where gRPC's are, in the router's validation.
"""

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Final, get_args, get_origin, get_type_hints

from pydantic import BaseModel, BeforeValidator, Field, create_model

from diptych.errors import InvalidRequestError
from diptych.sampling_params import OPTIONS, Option, SamplingOptions
from router.frontend.http.body import StrictModel, validated

# An answer over HTTP has no place for margins; constraints have names of their own.
_NOT_BY_NAME: Final = frozenset({"return_margins", "constraint"})

_ID: Final = re.compile("0|[1-9][0-9]{0,18}")
_EVERY_TOKEN: Final = -1  # for top_k, as vLLM says it; ours is 0
_ANY_SEED: Final = -1  # as vLLM and its clients say that they want none of their own
_LEAST_SEED: Final = -(2**63)  # as OpenAI has it
SERVED: Final = frozenset(OPTIONS) - _NOT_BY_NAME
"""The names that a body may use."""


def read_sampling(content: Mapping[str, object], **defaults: Any) -> SamplingOptions:
    """What a body says of sampling; ``defaults`` where it leaves an option out.

    ``stop`` may be one string, ``seed`` a signed number. Raises InvalidRequestError.
    """
    if isinstance(content.get("stop"), str):
        content = {**content, "stop": [content["stop"]]}
    _check_lengths(content)
    read = validated(_MODEL, content)
    given = {name: value for name, value in read if value is not None}
    if given.get("top_k") == _EVERY_TOKEN:
        given["top_k"] = 0
    seed = given.pop("seed", _ANY_SEED)
    if seed != _ANY_SEED:
        given["seed"] = seed % 2**64 if _LEAST_SEED <= seed < 0 else seed
    lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    return SamplingOptions(**{**defaults, **given, **lists})


def _check_lengths(content: Mapping[str, object]) -> None:
    """Before anything looks at the items."""
    for name in SERVED:
        value, most = content.get(name), OPTIONS[name].max_items
        if most and isinstance(value, list | dict) and len(value) > most:
            raise InvalidRequestError(f"has {len(value)} items, more than {most}", field=name)


def _field(hint: Any, option: Option) -> Any:
    """The type of a member: null says no more than its absence."""
    if get_origin(hint) is Mapping:
        return (_BY_TOKEN_ID | None, None)
    if not option.max_items:
        return (hint | None, None)
    item: Any = get_args(hint)[0]
    if item is int:
        item = Annotated[int, Field(ge=option.low, le=option.high)]
    items = list.__class_getitem__(item)
    return (items | None, None)


def _by_token_id(value: object) -> object:
    """The names of JSON's members are texts; an id has one that is right."""
    if not isinstance(value, dict):
        raise ValueError("should be an object with a number for each token id")
    for name in value:
        if not _ID.fullmatch(name):
            raise ValueError(f"{name[:64]!r} is not a token id")
    return {int(name): number for name, number in value.items()}


_BY_TOKEN_ID: Final = Annotated[dict[int, float], BeforeValidator(_by_token_id)]


def _make_model() -> type[BaseModel]:
    hints = get_type_hints(SamplingOptions)
    members: dict[str, Any] = {
        item.name: _field(hints[item.name], OPTIONS[item.name])
        for item in fields(SamplingOptions)
        if item.name in SERVED
    }
    return create_model("SamplingFields", __base__=StrictModel, **members)


_MODEL: Final = _make_model()
