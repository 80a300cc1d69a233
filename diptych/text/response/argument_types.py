"""Arguments that a model wrote as bare text, as the tool's schema wants them. Pure."""

from collections.abc import Mapping
from typing import Final

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
_WORDS: Final = {"True": "true", "False": "false", "None": "null"}


def typed(text: str, schema: object) -> object:
    """What ``text`` says as a value that ``schema`` allows; else the text itself.

    Where the schema says nothing of types, what reads as JSON is no text.
    """
    types = _types(schema)
    if types == {"string"}:
        return text
    bare = text.strip()
    try:
        value = read_json(_WORDS.get(bare, bare))
    except (ValueError, RecursionError):
        return text
    if not types:
        return text if isinstance(value, str) else value
    for name in types & _MATCHES.keys():
        if isinstance(value, bool) and name in ("integer", "number"):
            continue
        if isinstance(value, _MATCHES[name]):
            return value
        if name == "integer" and isinstance(value, float) and value.is_integer():
            return int(value)
    return text


def schema_of(tools: ToolSchemas, name: str, argument: str) -> object:
    """That of one argument; None where nothing is said of it."""
    properties = tools.get(name, {}).get("properties")
    return properties.get(argument) if isinstance(properties, dict) else None


def _types(schema: object) -> set[str]:
    if not isinstance(schema, dict):
        return set()
    said = schema.get("type")
    found = {said} if isinstance(said, str) else set()
    if isinstance(said, list):
        found |= {each for each in said if isinstance(each, str)}
    for union in ("anyOf", "oneOf"):
        choices = schema.get(union)
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict) and not choice.keys() & {"anyOf", "oneOf"}:
                found |= _types(choice)
    choices = schema.get("enum")
    if not found and isinstance(choices, list) and all(isinstance(each, str) for each in choices):
        return {"string"}
    return found
