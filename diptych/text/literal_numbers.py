"""Whole numbers that a JSON schema names and that llguidance would round. Pure.

It has them as doubles, so that an output would have to be another number than the schema says: of
``{"enum": [1234567890123456789]}`` nothing would come but 1234567890123456768.
"""

import json
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Final

_LITERALS: Final = ("const", "enum")
_LOWER_BOUNDS: Final = ("minimum", "exclusiveMinimum")
_UPPER_BOUNDS: Final = ("maximum", "exclusiveMaximum")
_SAY_NOTHING: Final = ("default", "description", "examples", "title")
_BY_NAME: Final = ("$defs", "definitions", "patternProperties", "properties")
_WITHIN_LARK: Final = re.compile(r"%json\s*(?=\{)")
_LEAST: Final = -(2**63)
_MOST: Final = 2**63 - 1


def check_schema(text: str) -> None:
    """Of a schema as text; what is no JSON is for others to refuse. Raises ValueError."""
    _check(text, 0)


def check_lark(text: str) -> None:
    """Of the schemas in a grammar. Raises ValueError."""
    for match in _WITHIN_LARK.finditer(text):
        begin = match.end()
        try:
            _check(text, begin)
        except ValueError as error:
            line, column = text.count("\n", 0, begin) + 1, begin - text.rfind("\n", 0, begin)
            raise ValueError(f"at {line}({column}): {error}") from None


def _check(text: str, begin: int) -> None:
    try:
        schema, _ = _DECODER.raw_decode(text, begin)
        problem = next(_problems(schema), None)
    except (json.JSONDecodeError, RecursionError):
        return
    if problem is not None:
        raise ValueError(problem)


def _problems(schema: object) -> Iterator[str]:
    if isinstance(schema, list):
        for each in schema:
            yield from _problems(each)
    elif isinstance(schema, Mapping):
        for name, value in schema.items():
            if name in _LITERALS:
                for number in _rounded_within(value):
                    yield f"the number {str(number)[:64]} would be rounded: say it as a text"
            elif name in (*_LOWER_BOUNDS, *_UPPER_BOUNDS):
                if isinstance(value, int | float) and _lets_in_more(name, value):
                    yield f"{name} {str(value)[:64]} would be rounded, to let in what it does not"
            elif name in _BY_NAME and isinstance(value, Mapping):
                yield from _problems(list(value.values()))
            elif name not in _SAY_NOTHING:
                yield from _problems(value)


def _rounded_within(value: object) -> Iterator[int]:
    if isinstance(value, int) and not _is_kept(value):
        yield value
    elif isinstance(value, list | Mapping):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _rounded_within(each)


def _lets_in_more(name: str, bound: float) -> bool:
    """Whether llguidance reads it as one beyond; what 64 bits do not hold as the last they do."""
    read = min(float(max(_LEAST, min(_MOST, bound))), _MOST)
    return read < bound if name in _LOWER_BOUNDS else read > bound


def _is_kept(number: int) -> bool:
    """As llguidance reads and writes it: what fits in 64 bits as that, others in few digits."""
    try:
        near = float(number)
    except OverflowError:
        return False
    if _LEAST < near <= -_LEAST:
        return min(int(near), _MOST) == number
    return int(Decimal(repr(near))) == number


def _whole_number(text: str) -> float:
    try:
        return int(text)
    except ValueError:  # of more digits than Python reads
        return float(text)


_DECODER: Final = json.JSONDecoder(parse_int=_whole_number)
