"""The chart's schema: values files fit, wrong values are refused and the wrong key is named."""

import json
from typing import Any

import jsonschema
import pytest
import yaml

from tests.unit.deploy.chart import ALL_VALUES, CHART, values_schema_text, with_defaults
from tests.unit.deploy.wrong_values import WRONG, Wrong

SCHEMA = json.loads(values_schema_text())
VALIDATOR = jsonschema.Draft7Validator(SCHEMA)


def closed_objects(schema: object) -> list[dict[str, Any]]:
    """Every object with named keys that the schema describes."""
    if isinstance(schema, list):
        return [found for part in schema for found in closed_objects(part)]
    if not isinstance(schema, dict):
        return []
    own = [schema] if "properties" in schema and "type" in schema else []
    return own + [found for part in schema.values() for found in closed_objects(part)]


def test_the_schema_is_one() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)


def test_no_unknown_key_is_let_through() -> None:
    objects = closed_objects(SCHEMA)
    assert len(objects) > 40
    assert all(found["additionalProperties"] is False for found in objects)


@pytest.mark.parametrize("path", [CHART / "values.yaml", *sum(ALL_VALUES.values(), ())], ids=str)
def test_values_files_fit(path: Any) -> None:
    VALIDATOR.validate(with_defaults(yaml.safe_load(path.read_text())))


def test_every_key_of_the_schema_has_a_default() -> None:
    """``helm show values`` is what people read: it names all there is, but for settings."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def missing(schema: dict[str, Any], value: Any, path: str) -> list[str]:
        if "$ref" in schema or "additionalProperties" not in schema or "properties" not in schema:
            return []
        found = []
        for key, part in schema["properties"].items():
            if key not in value:
                found.append(f"{path}.{key}")
            elif isinstance(value[key], dict):
                found += missing(part, value[key], f"{path}.{key}")
        return found

    absent = missing(SCHEMA, values, "")
    optional = {".global", "claims", "requests", "initialDelaySeconds"}
    assert [p for p in absent if p not in optional and p.rpartition(".")[2] not in optional] == []


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: f"{wrong.key}-{WRONG.index(wrong)}")
def test_a_wrong_value_is_refused_and_named(wrong: Wrong) -> None:
    errors = list(VALIDATOR.iter_errors(with_defaults(wrong.values)))
    named = [f"{list(error.absolute_path)} {error.message}" for error in errors]
    assert any(f"'{wrong.key}'" in text for text in named), named
