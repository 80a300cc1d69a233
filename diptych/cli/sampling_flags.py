"""The flags of a command that asks for answers: one for each sampling option."""

from dataclasses import MISSING, fields
from typing import Annotated, Any, Final

from pydantic import BaseModel, Field

from diptych import settings
from diptych.constraint import Constraint, ConstraintKind
from diptych.errors import InvalidRequestError
from diptych.sampling_params import OPTIONS, Option, SamplingOptions, check_options

FLAGS: Final = tuple(item.name for item in fields(SamplingOptions) if OPTIONS[item.name].is_flag)
"""The options that people may set."""


_Texts = Annotated[list[str], settings.AS_IT_IS]

_CONSTRAINTS: Final[dict[str, tuple[Any, str]]] = {
    "json_schema": (None, "JSON schema, as text, that the answer has to fit."),
    "regex": (None, "Regular expression that the answer has to match as a whole."),
    "grammar": (None, "Grammar, in Lark's syntax or as GBNF, that the answer has to follow."),
    "choice": ([], "Text that the answer may be; give each."),
}


def sampling_fields() -> dict[str, Any]:
    """One setting for each sampling option; lists and maps are repeatable flags."""
    made = {}
    for item in fields(SamplingOptions):
        if item.name not in FLAGS:
            continue
        kind, default = item.type, item.default
        if isinstance(default, tuple):
            kind, default = (list[int] if kind == tuple[int, ...] else _Texts), []
        elif default is MISSING:
            kind, default = dict[int, float], {}
        made[item.name] = (kind, Field(default, description=describe(OPTIONS[item.name])))
    return made | {
        name: (_Texts if name == "choice" else str | None, Field(default, description=text))
        for name, (default, text) in _CONSTRAINTS.items()
    }


def read_options(config: BaseModel) -> SamplingOptions:
    """What the settings of ``sampling_fields`` say. Raises InvalidRequestError."""
    given: dict[str, Any] = {name: getattr(config, name) for name in FLAGS}
    lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    options = SamplingOptions(**{**given, **lists, "constraint": _read_constraint(config)})
    check_options(options, "sampling")
    return options


def _read_constraint(config: BaseModel) -> Constraint | None:
    given = [name for name in _CONSTRAINTS if getattr(config, name) not in (None, [])]
    if len(given) > 1:
        raise InvalidRequestError(f"cannot go with {given[0]}", field=given[1])
    if not given:
        return None
    value = getattr(config, given[0])
    texts = tuple(value) if isinstance(value, list) else (value,)
    return Constraint(ConstraintKind(given[0]), texts)


def describe(option: Option) -> str:
    """The help text of an option."""
    if option.default is None:
        return option.help
    whose = "the model's own, or " if option.from_model else ""
    return f"{option.help} Unset: {whose}{option.default:g}."
