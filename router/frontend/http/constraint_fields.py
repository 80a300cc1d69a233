"""The form that an output must have, under the names that other servers gave it. Pure."""

import json
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from diptych.constraint import Constraint, ConstraintKind
from diptych.errors import InvalidRequestError
from router.frontend.http import unserved

_ANY_OBJECT: Final[Mapping[str, object]] = {"type": "object"}
# Members of a body, and of one of these members, which say one constraint each.
OBJECTS: Final = ("structured_outputs", "guided_decoding")
_OF_BODY: Final = {
    "guided_json": ConstraintKind.JSON_SCHEMA,
    "guided_regex": ConstraintKind.REGEX,
    "guided_grammar": ConstraintKind.GRAMMAR,
    "guided_choice": ConstraintKind.CHOICE,
    "json_schema": ConstraintKind.JSON_SCHEMA,
    "regex": ConstraintKind.REGEX,
    "ebnf": ConstraintKind.GRAMMAR,
    "grammar": ConstraintKind.GRAMMAR,
}
_OF_STRUCTURED_OUTPUTS: Final = {
    "json": ConstraintKind.JSON_SCHEMA,
    "regex": ConstraintKind.REGEX,
    "grammar": ConstraintKind.GRAMMAR,
    "choice": ConstraintKind.CHOICE,
}


class SaidConstraint(NamedTuple):
    """A constraint, and where in the body it stands."""

    constraint: Constraint
    field: str

    @property
    def names(self) -> Mapping[str, str]:
        """How to call the request's fields, see :func:`router.frontend.field_names.renamed`."""
        ours = f"sampling.constraint.{self.constraint.kind.value}"
        return dict.fromkeys((f"{ours}.texts", ours, "sampling.constraint"), self.field)


def read_constraint(content: Mapping[str, object]) -> SaidConstraint | None:
    """What a body says of the output's form; None: nothing. Raises InvalidRequestError."""
    return _only(
        [
            *_of_body(content),
            *_of_format(content.get("response_format"), "response_format", "json_schema"),
        ]
    )


def read_text_constraint(content: Mapping[str, object]) -> SaidConstraint | None:
    """The same of a body that says it in ``text``. Raises InvalidRequestError."""
    text = content.get("text")
    given = {} if text is None else _object(text, "text")
    unserved.refuse(given, unserved.OF_TEXT, "text")
    return _only([*_of_body(content), *_of_format(given.get("format"), "text.format")])


def _of_body(content: Mapping[str, object]) -> list[SaidConstraint]:
    found = [
        SaidConstraint(_read(content[name], kind, name), name)
        for name, kind in _OF_BODY.items()
        if content.get(name) is not None
    ]
    for within in OBJECTS:
        found += _of_structured_outputs(content.get(within), within)
    return found


def _only(found: Sequence[SaidConstraint]) -> SaidConstraint | None:
    if len(found) > 1:
        raise InvalidRequestError(f"cannot go with {found[0].field}", field=found[1].field)
    return found[0] if found else None


def _of_format(value: object, path: str, within: str = "") -> list[SaidConstraint]:
    """``within``: the member of a format that has its schema; none: it stands beside the type."""
    if value is None:
        return []
    given = _object(value, path)
    match given.get("type"):
        case "text":
            return []
        case "json_object":
            if given.get("schema") is not None:  # as some servers have it
                return [
                    SaidConstraint(_schema(given["schema"], f"{path}.schema"), f"{path}.schema")
                ]
            return [SaidConstraint(Constraint.json_schema(_ANY_OBJECT), path)]
        case "json_schema":
            at = f"{path}.{within}" if within else path
            schema = (_object(given.get(within), at) if within else given).get("schema")
            if schema is None:
                return [SaidConstraint(Constraint.json_schema(_ANY_OBJECT), f"{at}.schema")]
            return [SaidConstraint(_schema(schema, f"{at}.schema"), f"{at}.schema")]
    raise InvalidRequestError("should be text, json_object or json_schema", field=f"{path}.type")


def _of_structured_outputs(value: object, within: str) -> list[SaidConstraint]:
    if value is None:
        return []
    given = _object(value, within)
    unserved.refuse(given, unserved.OF_STRUCTURED_OUTPUTS, within)
    found = [
        SaidConstraint(_read(given[name], kind, f"{within}.{name}"), f"{within}.{name}")
        for name, kind in _OF_STRUCTURED_OUTPUTS.items()
        if given.get(name) is not None
    ]
    if given.get("json_object"):
        found.append(SaidConstraint(Constraint.json_schema(_ANY_OBJECT), f"{within}.json_object"))
    return found


def _read(value: object, kind: ConstraintKind, path: str) -> Constraint:
    if kind is ConstraintKind.JSON_SCHEMA:
        return _schema(value, path)
    if kind is ConstraintKind.CHOICE:
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise InvalidRequestError("should be a list of texts", field=path)
        return Constraint.choice(*value)
    if not isinstance(value, str):
        raise InvalidRequestError("should be a text", field=path)
    return Constraint(kind, (value,))


def _schema(value: object, path: str) -> Constraint:
    """A schema, or its text."""
    if isinstance(value, bool):
        return Constraint.json_schema(json.dumps(value))
    if not isinstance(value, str | dict):
        raise InvalidRequestError("should be a JSON schema", field=path)
    return Constraint.json_schema(value)


def _object(value: object, path: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise InvalidRequestError("should be an object", field=path)
    return value
