"""Bare texts as values of the types that a tool's schema says."""

import json
import time
from typing import Any

import pytest

from diptych.text.response.argument_types import ArgumentTypes
from diptych.text.response.families import family
from tests.unit.text.response.parsing import parse

DEFS: dict[str, Any] = {
    "Address": {"type": "object", "properties": {"city": {"type": "string"}}},
    "Zip": {"type": "string", "enum": ["10115"]},
    "Num": {"type": "integer"},
    "Same": {"$ref": "#/$defs/Num"},
    "Loop": {"$ref": "#/$defs/Loop"},
    "Tree": {"anyOf": [{"type": "array"}, {"$ref": "#/$defs/Tree"}, {"type": "null"}]},
    "a/b~c d": {"type": "string"},
    "Maybe": {"anyOf": [{"anyOf": [{"$ref": "#/$defs/Num"}]}, {"type": "null"}]},
}


def value_of(schema: Any, text: str, **root: Any) -> object:
    said = {"$defs": DEFS, "properties": {"x": schema}, **root}
    return ArgumentTypes(said).typed("x", text)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"anyOf": [{"$ref": "#/$defs/Address"}, {"type": "null"}]}, '{"a": 1}', {"a": 1}),
        ({"anyOf": [{"$ref": "#/$defs/Address"}, {"type": "null"}]}, "None", None),
        ({"$ref": "#/$defs/Zip"}, "10115", "10115"),
        ({"allOf": [{"$ref": "#/$defs/Zip"}]}, "10115", "10115"),
        ({"allOf": [{"$ref": "#/$defs/Num"}], "description": "x"}, "3", 3),
        ({"allOf": [{"type": ["string", "integer"]}, {"type": "string"}]}, "3", "3"),
        ({"allOf": [{}, {"type": "string"}]}, "3", "3"),
        ({"$ref": "#/$defs/Same"}, "3.0", 3),
        ({"$ref": "#/$defs/Maybe"}, "3", 3),
        ({"$ref": "#/$defs/a~1b~0c%20d"}, "3", "3"),
        ({"$ref": "#/$defs/Maybe/anyOf/1"}, "null", None),
        ({"$ref": "#/$defs/Tree"}, "[1]", [1]),
        ({"$ref": "#/$defs/Tree"}, "5", "5"),
        ({"const": "5"}, "5", "5"),
        ({"const": 5}, "5", 5),
        ({"const": None}, "null", None),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2.5, True, [], {}]}, "2.5", 2.5),
        ({"enum": ["a", None]}, "null", None),
        ({"type": ["string", "null"], "enum": ["1", None]}, "1", "1"),
        ({"type": "object", "anyOf": [{"required": ["a"]}, True]}, '{"a": 1}', {"a": 1}),
        ({"type": "string", "anyOf": [{"minLength": 1}, {"maxLength": 9}]}, "3", "3"),
        # What nobody knows the type of may be an object or a list.
        ({"$ref": "https://else.where/a.json"}, "3", 3),
        ({"$ref": "#/$defs/None"}, "3", 3),
        ({"$ref": "#/$defs/Loop"}, "3", 3),
        ({"anyOf": [{"$ref": "#/$defs/None"}, {"type": "null"}]}, '{"a": 1}', {"a": 1}),
        ({"oneOf": [{"type": "string"}, {"$ref": "x"}]}, "[1]", [1]),
        ({"oneOf": [{"type": "string"}, {"$ref": "x"}]}, "1", "1"),
        ({"anyOf": []}, "1", 1),
        ({"type": 5}, "1", 1),
        (True, "1", 1),
    ],
)
def test_a_schema_says_its_type_in_many_ways(schema: Any, text: str, value: object) -> None:
    found = value_of(schema, text)
    assert found == value
    assert type(found) is type(value) or isinstance(found, dict)


def test_a_tools_own_schema_may_be_elsewhere() -> None:
    args = {"properties": {"x": {"type": "string"}}}
    assert ArgumentTypes({"$defs": {"A": args}, "$ref": "#/$defs/A"}).typed("x", "1") == "1"
    one_of_all = {"$defs": {"A": args}, "allOf": [{}, {"$ref": "#/$defs/A"}]}
    assert ArgumentTypes(one_of_all).typed("x", "1") == "1"
    assert ArgumentTypes({"$ref": "#", "allOf": 5}).typed("x", "1") == 1
    assert ArgumentTypes({"properties": []}).typed("x", "1") == 1


def test_what_schemas_cost_is_bounded() -> None:
    """References are followed once, and not for ever."""
    wide = {f"D{i}": {"anyOf": [{"$ref": f"#/$defs/D{i + 1}"}] * 100} for i in range(100)}
    deep: Any = {"type": "string"}
    for _ in range(500):
        deep = {"allOf": [deep]}
    schema = {
        "$defs": wide,
        "properties": {"x": {"$ref": "#/$defs/D0"}, "y": deep},
    }
    begun_s = time.thread_time()
    types = ArgumentTypes(schema)
    assert types.typed("x", "1") == 1
    assert types.typed("y", "1") == 1
    assert time.thread_time() - begun_s < 0.5


def test_calls_have_arguments_of_the_types_that_are_referred_to() -> None:
    tools = {"f": {"$defs": DEFS, "properties": {"x": {"$ref": "#/$defs/Zip"}}}}
    for text, form in (
        ("<function=f>\n<parameter=x>\n10115\n</parameter>\n</function>", "qwen-xml"),
        ("<tool_call>f<arg_key>x</arg_key><arg_value>10115</arg_value></tool_call>", "glm"),
    ):
        (call,) = parse(family(form), [text], tools=tools).calls
        assert json.loads(call.arguments) == {"x": "10115"}


@pytest.mark.parametrize("said", ["7e12345", "[1, -7e12345]", '{"a": 7e12345}'])
@pytest.mark.parametrize("schema", [{}, {"type": ["number", "array", "object"]}])
def test_a_number_that_is_too_large_is_a_text_and_no_call_is_lost_for_it(
    said: str, schema: Any
) -> None:
    """As a commit may look like one, of a tool that says nothing of types."""
    body = f"<function=f>\n<parameter=x>\n{said}\n</parameter>\n</function>"
    tools = {"f": {"properties": {"x": schema}}}
    parsed = parse(family("qwen-xml"), [f"<tool_call>\n{body}\n</tool_call>"], tools=tools)
    assert [json.loads(call.arguments) for call in parsed.calls] == [{"x": said}]
    assert not parsed.content
