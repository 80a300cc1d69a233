"""Settings of a process from flags, environment and file, in that order of precedence.

Configurations are plain frozen pydantic models, so that code and tests build
them without reading anything; only :func:`load`, called once at start, looks at
the command line, the environment and a YAML file. A wrong or unknown setting
becomes one line that names the flag.
"""

import argparse
import inspect
import json
import os
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple, TypeVar, get_args

import yaml
from pydantic import BaseModel, ByteSize, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from diptych.errors import ConfigurationError

C = TypeVar("C", bound=BaseModel)

# Kubernetes injects such variables for a service named like our prefix, and what its port is.
_SERVICE_LINK = re.compile(r"(SERVICE_(HOST|PORT.*)|PORT_\d+_.*)$")
_SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://")
# Of pydantic's: a list whose parts look like numbers to Python, and are none in JSON.
_LIST_FLAG = re.compile(r'error parsing value for field "(\w+)" from source "CliSettingsSource"')
_LIST_TYPE = re.compile(r"(?:list|tuple)\[(.*?)(?:,\.\.\.)?\]$")
_MERGE = "tag:yaml.org,2002:merge"  # the key <<
_NO_VALUE = "\0"  # what pydantic takes for null, of a flag: no text that anybody can give

AS_IT_IS: Final = object()
"""Marks a list of texts, in its annotation: each flag is one of them, to its last space."""

ADDRESSES: Final = object()
"""Marks a list of host:port, likewise: pydantic takes an IPv6 address's brackets for a list's."""


def load(
    config_type: type[C], args: Sequence[str] | None = None, *, prog: str, env_prefix: str
) -> C:
    """Build ``config_type`` from ``args`` (``sys.argv[1:]``), environment and ``--config`` file.

    ``--help`` prints and exits.

    Raises:
        ConfigurationError: a setting is unknown, missing or wrong; one line.
    """
    args = list(sys.argv[1:] if args is None else args)
    path = _config_path(args, env_prefix)
    content = {} if path is None else _read_file(path)
    _refuse_switches(config_type, content)
    told = _taken_as_they_are(config_type, args)
    loader = _loader(config_type, told.values, content, prog, env_prefix)
    _refuse_unknown_environment(loader, env_prefix)
    try:
        flags = CliSettingsSource[BaseSettings](
            loader,
            cli_parse_args=told.others,
            formatter_class=partial(_HelpFormatter, enums=list(_enums_in(config_type))),
        )
        loaded: BaseModel = loader(_cli_settings_source=flags)
        values = loaded.model_dump(by_alias=True, exclude={"config"})
        _refuse_no_text(values)
        return config_type.model_validate(values)
    except ValidationError as error:
        raise ConfigurationError(one_line(error)) from None
    except SettingsError as error:
        raise ConfigurationError(_not_json(error, env_prefix) or _plain(str(error))) from None


def environment(prefix: str) -> Mapping[str, str]:
    """The variables whose names begin so and that are set to something."""
    return {name: value for name, value in os.environ.items() if name.startswith(prefix) and value}


def environment_without(prefix: str) -> Mapping[str, str]:
    """The variables for a process that has its settings from elsewhere."""
    return {n: value for n, value in os.environ.items() if not n.upper().startswith(prefix)}


def one_line(error: ValidationError) -> str:
    """What is wrong, as ``--flag: reason (got value)``, for up to three fields."""
    problems: dict[str, str] = {}
    for item in error.errors(include_url=False):
        names = [part for part in item["loc"] if isinstance(part, str)]
        flag = "--" + ".".join(names).replace("_", "-")
        reason = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            reason = "no such setting"
        elif item["type"] == "missing":
            reason = "is required"
        elif isinstance(item["input"], str | int | float) and "(got " not in reason:
            reason += f" (got {item['input']!r})"
        problems.setdefault(flag, f"{flag}: {reason}" if names else reason)
    return "; ".join(list(problems.values())[:3])


def _loader(
    config_type: type[C],
    told: dict[str, list[str]],
    content: dict[str, Any],
    prog: str,
    env_prefix: str,
) -> type[BaseSettings]:
    def customise(
        cls: type[BaseSettings],
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        assert isinstance(env_settings, EnvSettingsSource)
        env_settings.env_vars = _without_service_links(env_settings.env_vars)
        file = InitSettingsSource(settings_cls, content)
        return (InitSettingsSource(settings_cls, told), env_settings, file)

    namespace: dict[str, Any] = {
        "__doc__": inspect.cleandoc(config_type.__doc__ or ""),
        "__module__": __name__,
        "__annotations__": {"config": Path | None},
        "config": Field(None, description="YAML file of settings, named as the flags with _."),
        "model_config": SettingsConfigDict(
            env_prefix=env_prefix,
            env_prefix_target="all",  # else an alias is a variable of its own, whosever that is
            env_nested_delimiter="__",
            extra="forbid",
            cli_prog_name=prog,
            cli_kebab_case=True,
            cli_avoid_json=True,
            cli_parse_none_str=_NO_VALUE,
            cli_hide_none_type=True,
            cli_implicit_flags=True,
            cli_exit_on_error=False,
        ),
        "settings_customise_sources": classmethod(customise),
    }
    return type(f"{config_type.__name__}Loader", (BaseSettings, config_type), namespace)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """One short usage line; what a value is instead of its Python type; no empty defaults.

    Members of ``enums`` are shown as their values, which files and variables take alone.
    """

    _METAVARS: ClassVar = {
        "str": "TEXT",
        "dict[int,float]": "N=X",
        "int": "N",
        "float": "X",
        "Path": "PATH",
        "ByteSize": "SIZE",
    }

    def __init__(self, prog: str, *, enums: Iterable[type[StrEnum]]) -> None:
        super().__init__(prog)
        self._enums = {f"{{{','.join(each.__members__)}}}": each for each in enums}

    def add_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[Any],
        prefix: str | None = None,
    ) -> None:
        positional = [_usage_of(action) for action in actions if not action.option_strings]
        super().add_usage(
            " ".join(["%(prog)s", *positional, "[SETTINGS]"]), actions, groups, prefix
        )

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        if not isinstance(action.metavar, str):
            return super()._format_args(action, default_metavar)
        enum = self._enums.get(action.metavar)
        if enum is not None:
            return f"{{{','.join(enum)}}}"
        one = _LIST_TYPE.sub(r"\1", action.metavar)
        if one.startswith("{"):
            return f"{{{one.replace('{', '').replace('}', '')}}}"  # a choice may be a choice
        return self._METAVARS.get(one, one)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, metavar = super()._get_help_string(action), str(action.metavar or "")
        if text is None:
            return None
        if metavar == "ByteSize":
            text = re.sub(
                r"(?<=default: )\d+(?=\)$)",
                lambda size: ByteSize(size.group()).human_readable(),
                text,
            )
        if metavar in self._enums:
            values = dict[str, str](self._enums[metavar].__members__)
            text = re.sub(
                r"(?<=default: )\w+(?=\)$)",
                lambda name: values.get(name.group(), name.group()),  # of a model it is the value
                text,
            )
        text = re.sub(rf" \(default: (None|{_NO_VALUE}||\[\]|{{}})\)$", "", text)
        if _LIST_TYPE.match(metavar):
            text = re.sub(r"(?<=default: )[(\[](.*)[)\]](?=\)$)", _comma_separated, text)
        if not metavar.startswith("list["):
            return text
        said, default, value = text.partition(" (default: ")
        return f"{said} Repeatable.{default}{value}"


def _enums_in(kind: Any) -> Iterator[type[StrEnum]]:
    """Those that a type is, or has in it: a model its fields', and those of models within."""
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        yield kind
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        for field in kind.model_fields.values():
            yield from _enums_in(field.annotation)
    for part in get_args(kind):
        yield from _enums_in(part)


def _usage_of(positional: argparse.Action) -> str:
    name = str(positional.metavar or positional.dest)
    return f"[{name}]" if positional.nargs == "?" else name


def _comma_separated(values: re.Match[str]) -> str:
    return values.group(1).replace("'", "").replace(" ", "").rstrip(",")


class _KeyProblemError(Exception):
    """A key of a mapping names no setting; the line is said."""


class _SettingsFile(yaml.SafeLoader):
    """YAML whose keys are texts, none of them twice in one mapping. Raises _KeyProblemError."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            where = f"line {key.start_mark.line + 1}: {key.value}"
            if key.tag != self.DEFAULT_SCALAR_TAG:
                raise _KeyProblemError(f"{where} is not text, and names no setting")
            if key.value in seen:
                raise _KeyProblemError(f"{where} is there twice")
            seen.add(key.value)
        made = super().construct_mapping(node, deep)
        for name in made:  # some may have come by way of <<
            if not isinstance(name, str):
                where = f"line {node.start_mark.line + 1}: {name}"
                raise _KeyProblemError(f"{where} is not text, and names no setting")
        return made


class _Told(NamedTuple):
    """Arguments: texts that were given as they are, by setting, and all others."""

    values: dict[str, list[str]]
    others: list[str]


def _taken_as_they_are(config_type: type[BaseModel], args: Sequence[str]) -> _Told:
    """Take out what pydantic would read as a list: it parts texts at commas, and trims them."""
    readers = {
        f"--{name.replace('_', '-')}": (name, read)
        for name, field in config_type.model_fields.items()
        for marker, read in ((AS_IT_IS, _one), (ADDRESSES, _listed))
        if any(each is marker for each in field.metadata)
    }
    told = _Told({}, [])
    left = deque(args)
    while left and left[0] != "--":
        flag, equals, value = left[0].partition("=")
        has_value = bool(equals) or (len(left) > 1 and not _is_flag(left[1]))
        first = left.popleft()
        if flag not in readers or not has_value:
            told.others.append(first)
            continue
        name, read = readers[flag]
        told.values.setdefault(name, []).extend(read(value if equals else left.popleft()))
    told.others.extend(left)
    return told


def _one(value: str) -> list[str]:
    return [value]


def _listed(value: str) -> list[str]:
    """Parted by commas, or as JSON has it, whose parts may be anything: their checks follow."""
    try:
        parts = json.loads(value)
    except (ValueError, RecursionError):
        parts = None
    return parts if isinstance(parts, list) else [part.strip() for part in value.split(",")]


def _is_flag(arg: str) -> bool:
    """As argparse tells flags from values."""
    return arg.startswith("-") and len(arg) > 1 and " " not in arg


def _config_path(args: Sequence[str], env_prefix: str) -> Path | None:
    """Of the flag, else of the variable; None: there is no file."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", type=Path)
    try:
        path: Path | None = parser.parse_known_args(args)[0].config
    except argparse.ArgumentError:
        raise ConfigurationError("--config: expected one argument") from None
    if path is not None:
        return path
    variable = f"{env_prefix}CONFIG"
    said = (value for name, value in os.environ.items() if name.upper() == variable and value)
    return next(map(Path, said), None)


def _read_file(path: Path) -> dict[str, Any]:
    """The settings in a file, which is read once: it may be a pipe. Raises ConfigurationError."""
    try:
        content = _SettingsFile(path.read_bytes()).get_single_data()
    except OSError as error:
        raise ConfigurationError(f"--config: {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        detail = " ".join(str(error).split())
        raise ConfigurationError(f"--config: {path} is not YAML: {detail}") from None
    except _KeyProblemError as error:
        raise ConfigurationError(f"--config: {path}: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigurationError(f"--config: {path}: expected settings as `name: value`")
    if any(name.lower() == "config" for name in content):
        raise ConfigurationError(f"--config: {path}: config: one file names no other")
    return content


def _refuse_switches(
    config_type: type[BaseModel], content: Mapping[str, Any], above: str = "--"
) -> None:
    """YAML's ``off`` and ``yes`` would pass for 0 and 1 where a number is wanted: a port, say.

    Raises ConfigurationError.
    """
    for name, field in config_type.model_fields.items():
        value, kind = content.get(field.alias or name), field.annotation
        flag = above + name.replace("_", "-")
        if isinstance(value, Mapping) and isinstance(kind, type) and issubclass(kind, BaseModel):
            _refuse_switches(kind, value, f"{flag}.")
        elif isinstance(value, bool) and bool not in (kind, *get_args(kind)):
            raise ConfigurationError(f"{flag}: cannot be on or off, yes or no (got {value})")


def _refuse_no_text(values: Mapping[Any, object], above: str = "--") -> None:
    """Bytes of a flag or a variable that are no UTF-8, which only the name of a file may have.

    Raises ConfigurationError, which says nothing of what they are: it may be a secret.
    """
    for name, value in values.items():
        flag = above + str(name).replace("_", "-")
        if isinstance(value, Mapping):
            _refuse_no_text(value, f"{flag}.")
            continue
        for text in value if isinstance(value, list | tuple) else (value,):
            if isinstance(text, str) and not _is_utf8(text):
                raise ConfigurationError(f"{flag}: is no UTF-8")


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse_unknown_environment(loader: type[BaseSettings], env_prefix: str) -> None:
    names = (field.alias or name for name, field in loader.model_fields.items())
    known = {f"{env_prefix}{name}".upper() for name in names}
    for variable, value in os.environ.items():
        name = variable.upper()
        if not name.startswith(env_prefix) or name.split("__")[0] in known:
            continue
        if not (_SERVICE_LINK.search(name) or _is_service_port(name, value)):
            raise ConfigurationError(f"environment: {variable}: no such setting")


def _without_service_links(variables: Mapping[str, str | None]) -> Mapping[str, str | None]:
    """Leave out what Kubernetes says of a service whose name ends like a setting of ours."""
    return {
        name: value for name, value in variables.items() if not _is_service_port(name, value or "")
    }


def _is_service_port(name: str, value: str) -> bool:
    return name.upper().endswith("PORT") and bool(_SERVICE_ADDRESS.match(value))


def _not_json(error: SettingsError, env_prefix: str) -> str | None:
    """Which flag or variable was to be JSON and is not, if that is the error."""
    cause = error.__cause__
    if not isinstance(cause, json.JSONDecodeError):
        return None
    flag = _LIST_FLAG.match(str(error))
    if flag is not None:
        name, given = flag[1].replace("_", "-"), cause.doc.removeprefix("[").removesuffix("]")
        return f"--{name}: expected values as JSON has them, such as 0.5 (got {given!r})"
    for variable, value in os.environ.items():
        if variable.upper().startswith(env_prefix) and value == cause.doc:
            forms = """["a", "b"] or {"name": 1}"""
            return f"environment: {variable}: expected JSON, as {forms} (got {value!r})"
    return None


def _plain(message: str) -> str:
    return " ".join(message.removeprefix("error parsing CLI: ").split())
