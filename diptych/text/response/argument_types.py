"""Arguments that a model wrote as bare text, as the tool's schema wants them. Pure."""

import json
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple
from urllib.parse import unquote

from diptych.text.response.json_source import read_json

ToolSchemas = Mapping[str, Mapping[str, object]]
"""Of each tool, by its name, the JSON schema of its arguments."""

_MATCHES: Final[Mapping[str, tuple[type, ...]]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "array": (list,),
}
_NAMES: Final[Mapping[type, str]] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
    dict: "object",
    list: "array",
}
_WORDS: Final = {"True": "true", "False": "false", "None": "null"}
_MOST_DEPTH: Final = 32  # schemas within each other, those that are referred to included
_MOST_SCHEMAS: Final = 4096  # of one call: a client can refer to many, many times


class _Types(NamedTuple):
    """What values a schema allows. ``has_others``: ones whose types nobody knows, too."""

    names: frozenset[str] = frozenset()
    has_others: bool = False

    @property
    def are_known(self) -> bool:
        return bool(self.names) and not self.has_others


_NONE: Final = _Types()
_ANY: Final = _Types(has_others=True)


class ArgumentTypes:
    """The types of one tool's arguments, for one call. One owner.

    Invariant: no more than ``_MOST_SCHEMAS`` are looked into, of which the rest says nothing.
    """

    def __init__(self, schema: Mapping[str, object]) -> None:
        """``schema``: that of all arguments. References are followed within it."""
        self._schema = schema
        self._num_left = _MOST_SCHEMAS
        self._referred: dict[str, _Types] = {}

    def typed(self, name: str, text: str) -> object:
        """What ``text`` says as a value of the argument's schema; else the text itself.

        Where the schema says nothing of types, what reads as JSON is no text; but a number is one
        that is too large, as a commit's ``7e12345`` would be.
        """
        types = self._types(self._argument(name), _MOST_DEPTH)
        if types == _Types(frozenset({"string"})):
            return text
        bare = text.strip()
        try:
            value = read_json(_WORDS.get(bare, bare))
            json.dumps(value, allow_nan=False)  # a number may be too large to be said again
        except (ValueError, RecursionError):
            return text
        if not types.names:
            return text if isinstance(value, str) else value
        if types.has_others and isinstance(value, dict | list):
            return value
        if any(_is(value, each) for each in types.names):
            return value
        if "integer" in types.names and isinstance(value, float) and value.is_integer():
            return int(value)
        return text

    def _argument(self, name: str) -> object:
        """Its schema; None where nothing is said of it."""
        waiting: list[object] = [self._schema]
        for _ in range(_MOST_DEPTH):
            schema = waiting.pop() if waiting else None
            if not isinstance(schema, Mapping):
                continue
            properties = schema.get("properties")
            if isinstance(properties, dict) and name in properties:
                return properties[name]
            waiting += _list(schema.get("allOf"))
            if isinstance(reference := schema.get("$ref"), str):
                waiting.append(self._target(reference))
        return None

    def _types(self, schema: object, depth: int) -> _Types:
        self._num_left -= 1
        if not isinstance(schema, dict) or depth == 0 or self._num_left < 0:
            return _NONE if schema is False else _ANY
        found = _ANY
        for said in self._said(schema, depth - 1):
            found = _both(found, said)
        return found

    def _said(self, schema: Mapping[str, object], depth: int) -> Iterable[_Types]:
        """All that a schema says of types: each counts."""
        names = schema.get("type")
        yield _any_of(
            _Types(frozenset({each})) for each in _list(names) or [names] if isinstance(each, str)
        )
        if isinstance(reference := schema.get("$ref"), str):
            yield self._types_of(reference, depth)
        for each in _list(schema.get("allOf")):
            yield self._types(each, depth)
        for union in ("anyOf", "oneOf"):
            yield _any_of(self._types(each, depth) for each in _list(schema.get(union)))
        values = [schema["const"]] if "const" in schema else _list(schema.get("enum"))
        yield _Types(frozenset(_NAMES[type(each)] for each in values if type(each) in _NAMES))

    def _types_of(self, reference: str, depth: int) -> _Types:
        """Of what is referred to, which is looked into once, and says no more within itself."""
        if reference not in self._referred:
            self._referred[reference] = _NONE
            self._referred[reference] = self._types(self._target(reference), depth)
        return self._referred[reference]

    def _target(self, reference: str) -> object:
        """None: it is not in the schema."""
        if not reference.startswith("#"):
            return None
        found: object = self._schema
        for part in unquote(reference[1:]).split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            else:
                found = found.get(key) if isinstance(found, Mapping) else None
        return found


def _is(value: object, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(value, _MATCHES.get(name, ()))


def _list(said: object) -> list[object]:
    return said if isinstance(said, list) else []


def _both(one: _Types, other: _Types) -> _Types:
    """What both allow, as far as it is known of each."""
    if other in (_NONE, _ANY):
        return one
    if one in (_NONE, _ANY) or (other.are_known and not one.are_known):
        return other
    if one.are_known != other.are_known:
        return one
    names = one.names & other.names
    return _Types(names, one.has_others) if names else one


def _any_of(each: Iterable[_Types]) -> _Types:
    found = list(each)
    return _Types(
        frozenset().union(*(types.names for types in found)),
        any(types.has_others for types in found),
    )
