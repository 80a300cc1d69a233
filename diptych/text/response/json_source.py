"""JSON that remembers how it was written, so that nothing of it need be written again. Pure."""

import contextlib
import json
from typing import Final, NoReturn

import regex

_WHITESPACE: Final = " \t\n\r"
_DEPTH: Final = 4  # a list of calls, a call, its function, the arguments


class JsonObject(dict[str, object]):
    """An object with ``source``, the text that said it."""

    source: str

    def __init__(self, members: list[tuple[str, object]], source: str) -> None:
        super().__init__(members)
        self.source = source


def read_json(text: str) -> object:
    """The one value that ``text`` says; objects near its top are ``JsonObject``.

    Raises ValueError, RecursionError: it is not strict JSON, so names nothing twice either.
    """
    value, end = _read(text, _skip(text, 0), _DEPTH)
    if _skip(text, end) != len(text):
        raise ValueError("more than one value")
    return value


def read_named(text: str) -> JsonObject:
    """A call of what has a name: ``{"name": "f", "arguments": {}}``, and no other form of it.

    Its arguments are JSON as a grammar means it: a member may be there twice, and a number
    have any size. Raises ValueError.
    """
    match = _NAMED.fullmatch(text)
    if match is None:
        raise ValueError("not a name and arguments")
    name, source = json.loads(match[1]), match[2]
    with contextlib.suppress(RecursionError):  # deeper than Python reads: brackets were counted
        _ANY_DECODER.decode(source)
    return JsonObject([("name", name), ("arguments", JsonObject([], source))], text)


def _read(text: str, at: int, depth: int) -> tuple[object, int]:
    """The value that begins at ``at``, and where it ends."""
    begin = text[at : at + 1]
    if depth and begin == "{":
        return _read_object(text, at, depth - 1)
    if depth and begin == "[":
        return _read_list(text, at, depth - 1)
    return _DECODER.raw_decode(text, at)


def _read_object(text: str, begin: int, depth: int) -> tuple[object, int]:
    members: list[tuple[str, object]] = []
    at = _skip(text, begin + 1)
    while text[at : at + 1] != "}":
        if members:
            at = _expect(text, at, ",")
        if text[at : at + 1] != '"':
            raise ValueError("a member without a name")
        name, at = _DECODER.raw_decode(text, at)
        at = _expect(text, _skip(text, at), ":")
        value, at = _read(text, at, depth)
        members.append((name, value))
        at = _skip(text, at)
    return JsonObject(_once(members), text[begin : at + 1]), at + 1


def _read_list(text: str, begin: int, depth: int) -> tuple[object, int]:
    items: list[object] = []
    at = _skip(text, begin + 1)
    while text[at : at + 1] != "]":
        if items:
            at = _expect(text, at, ",")
        item, at = _read(text, at, depth)
        items.append(item)
        at = _skip(text, at)
    return items, at + 1


def _skip(text: str, at: int) -> int:
    while text[at : at + 1] and text[at] in _WHITESPACE:
        at += 1
    return at


def _expect(text: str, at: int, mark: str) -> int:
    """What comes behind ``mark``."""
    if text[at : at + 1] != mark:
        raise ValueError(f"no {mark}")
    return _skip(text, at + 1)


def _once(members: list[tuple[str, object]]) -> list[tuple[str, object]]:
    if len({name for name, _ in members}) < len(members):
        raise ValueError("a member is there twice")
    return members


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


_NAMED: Final = regex.compile(
    r'\{"name": ("(?:[^"\\]|\\.)*+"), "arguments": (\{.*\})\}', regex.DOTALL
)
_ANY_DECODER: Final = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=_no_constant)
_DECODER: Final = json.JSONDecoder(
    parse_constant=_no_constant, object_pairs_hook=lambda pairs: dict(_once(pairs))
)
