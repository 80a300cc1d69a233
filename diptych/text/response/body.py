"""The text of one field of calls, read as its template says. Pure; ValueError for garbage."""

import html
import json
from collections.abc import Mapping
from typing import Final, NamedTuple

import regex

from diptych.text.response.argument_types import ArgumentTypes, ToolSchemas
from diptych.text.response.json_source import JsonObject, read_json, read_named
from diptych.text.response.patience import Patience
from diptych.text.response.pythonic import read_calls
from diptych.text.response.template import Field

_PLACE: Final = regex.compile(r"\{(\w+(?:\.\w+)*)\}")
_BARE_NAME: Final = regex.compile(r"(?<=[{,])\s*+([^\s{}\[\],:\"][^{}\[\],:\"]*+):")
_ARGUMENTS: Final = ("arguments", "parameters")  # what models call them


class ParsedCall(NamedTuple):
    """A call of a tool. ``arguments`` is a JSON object, as the model wrote it if it did; so is
    ``id``, which most models do not write."""

    name: str
    arguments: str
    id: str = ""


class _Untyped(NamedTuple):
    """An argument that is bare text: its type stands in the tool's schema."""

    text: str


def read_body(
    field: Field,
    text: str,
    captures: Mapping[str, str],
    tools: ToolSchemas,
    patience: Patience,
) -> tuple[ParsedCall, ...]:
    """The calls that a field's text says, one at least.

    Raises:
        ValueError, RecursionError: it says something else.
        TimeoutError: ``patience`` ended.
    """
    value = _content(field, text, patience)
    if field.transform is not None:
        if field.transforms_each:
            items = value if isinstance(value, list) else [value]
            value = [_transformed(field.transform, {**captures, **_named(each)}) for each in items]
        else:
            value = _transformed(field.transform, {**captures, "content": value})
    calls = value if isinstance(value, list) else [value]
    if not calls:
        raise ValueError("no calls")
    found = tuple(_call(each, tools, field) for each in calls)
    if field.needs_known_name and any(each.name not in tools for each in found):
        raise ValueError("a name of no tool")
    own_id = captures.get("id")
    return (found[0]._replace(id=own_id),) if own_id and len(found) == 1 else found


def _content(field: Field, text: str, patience: Patience) -> object:
    match field.content:
        case "json":
            return _read_dialect(text, field.arguments, patience)
        case "named-json":
            return read_named(text)
        case "xml-inline":
            return _read_tags(text.rstrip(), field.arguments, patience)
        case "kv-lines":
            return _read_lines(text, field.arguments)
        case "pythonic":
            return read_calls(text)
    return text.strip()


def _read_dialect(text: str, arguments: Mapping[str, object], patience: Patience) -> object:
    """JSON, perhaps with names that have no quotes and with quotes of its own."""
    pairs = arguments.get("string_delims") or []
    if not pairs and not arguments.get("unquoted_keys"):
        return read_json(text)
    assert isinstance(pairs, list)
    ends = {str(begin): str(end) for begin, end in pairs}
    written: list[str] = []
    at = 0
    while (quote := _next_quote(text, at, ends)) is not None:
        begin, mark = quote
        written.append(_plain(text[at:begin], arguments, patience))
        begin += len(mark)
        end = text.find(ends[mark], begin)
        if end < 0:
            raise ValueError("a text without an end")
        written.append(json.dumps(text[begin:end], ensure_ascii=False))
        at = end + len(ends[mark])
    written.append(_plain(text[at:], arguments, patience))
    return read_json("".join(written))


def _next_quote(text: str, at: int, ends: Mapping[str, str]) -> tuple[int, str] | None:
    found = [(place, mark) for mark in ends if (place := text.find(mark, at)) >= 0]
    return min(found, default=None)


def _plain(text: str, arguments: Mapping[str, object], patience: Patience) -> str:
    """What is outside of all quotes."""
    if not arguments.get("unquoted_keys"):
        return text
    return str(_BARE_NAME.sub(_quoted, text, timeout=patience.left_s()))


def _quoted(name: "regex.Match[str]") -> str:
    return f'"{name[1].rstrip()}":'


def _read_tags(text: str, arguments: Mapping[str, object], patience: Patience) -> dict[str, object]:
    pattern = arguments["tag_pattern"]
    assert isinstance(pattern, regex.Pattern)
    found: dict[str, object] = {}
    at = 0
    for match in pattern.finditer(text, timeout=patience.left_s()):
        if text[at : match.start()].strip():
            raise ValueError("text between the tags")
        at = match.end()
        key = match["key"].strip()
        if arguments.get("escaped_keys"):
            key = html.unescape(key)
        if key in found:
            raise ValueError("an argument twice")
        found[key] = _tag_value(match["value"], match.groupdict().get("string"))
    if text[at:].strip():
        raise ValueError("text behind the tags")
    return found


def _tag_value(text: str, is_text: str | None) -> object:
    """``is_text``: what the tag itself says of it, if anything."""
    if is_text is None:
        return _Untyped(text)
    return text if is_text in ("true", "string") else read_json(text)


def _read_lines(text: str, arguments: Mapping[str, object]) -> dict[str, object]:
    found: dict[str, object] = {}
    separator = str(arguments.get("kv_sep", ":"))
    for line in text.split(str(arguments.get("line_sep", "\n"))):
        key, has_value, value = line.partition(separator)
        if has_value:
            found[key.strip()] = _Untyped(value.strip())
    return found


def _transformed(form: object, scope: Mapping[str, object]) -> object:
    if isinstance(form, dict):
        return {name: _transformed(each, scope) for name, each in form.items()}
    if isinstance(form, list):
        return [_transformed(each, scope) for each in form]
    place = _PLACE.fullmatch(form) if isinstance(form, str) else None
    if place is None:
        return form
    value: object = scope
    for name in place[1].split("."):
        members = _named(value)
        if name not in members:
            raise ValueError(f"no {name}")
        value = members[name]
    return value


def _named(value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise ValueError("not an object")
    return value


def _call(value: object, tools: ToolSchemas, field: Field) -> ParsedCall:
    said = _named(value)
    if "name" not in said:
        said = _named(said.get("function", said))
    name = said.get("name")
    arguments = next((said[each] for each in _ARGUMENTS if each in said), None)
    if arguments is None and name in tools and not field.needs_known_name:
        arguments = {}  # a mark says that it is a call
    if not isinstance(name, str) or not name.strip():
        raise ValueError("no name")
    if isinstance(arguments, str):  # an object's text as a text
        arguments = read_json(arguments)
    name = name.strip()
    name.encode()  # raises for half of a character, which JSON may say
    if isinstance(arguments, JsonObject):
        return ParsedCall(name, arguments.source)
    if not isinstance(arguments, dict):
        raise ValueError("arguments that are no object")
    types = ArgumentTypes(tools.get(name, {}))
    whole = {
        key: types.typed(key, each.text) if isinstance(each, _Untyped) else each
        for key, each in arguments.items()
    }
    try:
        written = json.dumps(whole, ensure_ascii=False, allow_nan=False)
    except TypeError:  # Python has more kinds of values
        raise ValueError("a value that no JSON says") from None
    written.encode()
    return ParsedCall(name, written)
