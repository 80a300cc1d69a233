"""What JSON says, as the wire's Struct carries it: every number a double. Pure."""

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from google.protobuf import struct_pb2

JSONValue: TypeAlias = "str | float | bool | Mapping[str, JSONValue] | Sequence[JSONValue] | None"
_Plain: TypeAlias = "str | float | dict[str, _Plain] | list[_Plain] | None"


def write_struct(given: Mapping[str, JSONValue], struct: struct_pb2.Struct, name: str) -> None:
    """Say ``given`` in ``struct``, which is then there, with members or without.

    Raises ValueError: something would arrive as something else; ``name`` says of what.
    """
    try:
        members = _members(given)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    struct.SetInParent()
    struct.update(members)


def _members(given: Mapping[str, JSONValue]) -> "dict[str, _Plain]":
    return {name: _plain(value) for name, value in given.items()}


def _plain(value: JSONValue) -> "_Plain":
    """The same in the types that a Struct takes."""
    match value:
        case None | str() | bool():
            return value
        case int() | float():
            return _double(value)
        case Mapping():
            return _members(value)
        case Sequence() if not isinstance(value, bytes | bytearray | memoryview):
            return [_plain(item) for item in value]
    raise ValueError(f"a {type(value).__name__} is nothing that JSON can say")


def _double(number: float) -> float:
    try:
        double = float(number)
    except OverflowError:
        double = math.inf
    if not math.isfinite(double) or double != number:
        raise ValueError("there is a number that no double carries")
    return double
