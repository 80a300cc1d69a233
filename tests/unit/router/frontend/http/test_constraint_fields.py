"""Constraints under the names that other servers gave them."""

import json

import pytest

from diptych.constraint import Constraint
from diptych.errors import InvalidRequestError
from router.frontend.field_names import renamed
from router.frontend.http.constraint_fields import read_constraint

SCHEMA = {"type": "integer"}
OF_SCHEMA = Constraint.json_schema(SCHEMA)
ANY_OBJECT = Constraint.json_schema({"type": "object"})


@pytest.mark.parametrize(
    ("said", "constraint", "field"),
    [
        ({"response_format": {"type": "json_object"}}, ANY_OBJECT, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            OF_SCHEMA,
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            ANY_OBJECT,
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            OF_SCHEMA,
            "response_format.schema",
        ),
        ({"structured_outputs": {"json": SCHEMA}}, OF_SCHEMA, "structured_outputs.json"),
        ({"guided_decoding": {"json": SCHEMA}}, OF_SCHEMA, "guided_decoding.json"),
        (
            {"structured_outputs": {"json_object": True}},
            ANY_OBJECT,
            "structured_outputs.json_object",
        ),
        (
            {"structured_outputs": {"choice": ["a", "b"], "regex": None}},
            Constraint.choice("a", "b"),
            "structured_outputs.choice",
        ),
        ({"guided_json": SCHEMA}, OF_SCHEMA, "guided_json"),
        ({"guided_json": json.dumps(SCHEMA)}, OF_SCHEMA, "guided_json"),
        ({"guided_json": True}, Constraint.json_schema("true"), "guided_json"),
        ({"guided_regex": "a+"}, Constraint.regex("a+"), "guided_regex"),
        ({"guided_grammar": "start: A"}, Constraint.grammar("start: A"), "guided_grammar"),
        ({"ebnf": "root ::= A"}, Constraint.grammar("root ::= A"), "ebnf"),
    ],
)
def test_each_name(said: dict[str, object], constraint: Constraint, field: str) -> None:
    found = read_constraint(said)
    assert found is not None
    assert (found.constraint, found.field) == (constraint, field)
    assert set(found.names.values()) == {field}


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"response_format": None, "guided_json": None, "structured_outputs": None},
        {"response_format": {"type": "text"}, "structured_outputs": {}},
        {"structured_outputs": {"json": None, "json_object": False, "disable_fallback": True}},
    ],
)
def test_nothing_is_said(said: dict[str, object]) -> None:
    assert read_constraint(said) is None


@pytest.mark.parametrize(
    ("said", "field"),
    [
        ({"guided_regex": "a", "guided_json": SCHEMA}, "guided_regex"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a", "json": SCHEMA}}, "structured_outputs.regex"),
        (
            {"structured_outputs": {"whitespace_pattern": "x"}},
            "structured_outputs.whitespace_pattern",
        ),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_regex": ["a"]}, "guided_regex"),
        ({"guided_choice": [1]}, "guided_choice"),
        (
            {"response_format": {"type": "json_schema", "json_schema": []}},
            "response_format.json_schema",
        ),
    ],
)
def test_what_is_wrong_is_named(said: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_constraint(said)
    assert caught.value.field == field


def test_one_of_several_choices_is_named_by_its_place() -> None:
    for said, field in (
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice"),
    ):
        found = read_constraint(said)
        assert found is not None
        with pytest.raises(InvalidRequestError) as caught:
            found.constraint.check("sampling.constraint")
        assert renamed(caught.value, found.names).field == f"{field}[1]"
