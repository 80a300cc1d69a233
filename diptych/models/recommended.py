"""How a model's makers want it sampled: their generation_config.json."""

from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from diptych.errors import ConfigurationError, InvalidRequestError
from diptych.json_file import read_object
from diptych.sampling_params import OPTIONS, SamplingOptions, check_options

_FILE = "generation_config.json"

_WHOLE = {item.name for item in fields(SamplingOptions) if item.type == int | None}

# What the file may say that would change an answer, were it served, with what changes nothing.
_NOT_SERVED = {"no_repeat_ngram_size": 0, "typical_p": 1.0}


class Recommended(NamedTuple):
    """``options`` apply where a client left an option unset; ``ignored`` is not served."""

    options: SamplingOptions
    ignored: tuple[str, ...]


def read_recommended(folder: Path) -> Recommended:
    """What ``folder`` recommends; nothing if it has no such file.

    Raises:
        ConfigurationError: a value is not one that a client could send either.
    """
    content = read_object(folder / _FILE, missing_ok=True)
    given: dict[str, Any] = {
        name: content[name]
        for name, option in OPTIONS.items()
        if option.from_model and content.get(name) is not None
    }
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigurationError(f"{folder / _FILE}: {name} is not a number")
        if name in _WHOLE and value % 1:
            raise ConfigurationError(f"{folder / _FILE}: {name} is not a whole number")
        given[name] = int(value) if name in _WHOLE else value
    if given.get("top_k") == -1:  # all, as some checkpoints say it
        given["top_k"] = 0
    options = SamplingOptions(**given)
    try:
        check_options(options, _FILE)
    except InvalidRequestError as error:
        raise ConfigurationError(f"{folder}: {error.message}") from None
    ignored = [
        name for name, neutral in _NOT_SERVED.items() if content.get(name) not in (None, neutral)
    ]
    return Recommended(options, tuple(ignored))
