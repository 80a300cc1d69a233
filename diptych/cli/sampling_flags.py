"""The flags of a command that asks for answers: one for each sampling option."""

from dataclasses import MISSING, fields
from typing import Any, Final

from pydantic import BaseModel, Field

from diptych.sampling_params import OPTIONS, Option, SamplingOptions, check_options

FLAGS: Final = tuple(item.name for item in fields(SamplingOptions) if OPTIONS[item.name].is_flag)
"""The options that people may set."""


def sampling_fields() -> dict[str, Any]:
    """One setting for each sampling option; lists and maps are repeatable flags."""
    made = {}
    for item in fields(SamplingOptions):
        if item.name not in FLAGS:
            continue
        kind, default = item.type, item.default
        if isinstance(default, tuple):
            kind, default = (list[int] if kind == tuple[int, ...] else list[str]), []
        elif default is MISSING:
            kind, default = dict[int, float], {}
        made[item.name] = (kind, Field(default, description=describe(OPTIONS[item.name])))
    return made


def read_options(config: BaseModel) -> SamplingOptions:
    """What the settings of ``sampling_fields`` say. Raises InvalidRequestError."""
    given: dict[str, Any] = {name: getattr(config, name) for name in FLAGS}
    lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    options = SamplingOptions(**{**given, **lists})
    check_options(options, "sampling")
    return options


def describe(option: Option) -> str:
    """The help text of an option."""
    if option.default is None:
        return option.help
    whose = "the model's own, or " if option.from_model else ""
    return f"{option.help} Unset: {whose}{option.default:g}."
