"""Messages as nobody should send them, made from good ones by a seeded generator. Pure.

Fields get values from the edges of their types, whatever the schema; then the bytes themselves
may be cut, changed, or have more behind them. Some of what comes out is good all the same.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_TEXTS: Final = ("", "a", "\x00", "\u2028", "\U0001f600", "x" * 5000, "a b", "system", "{", "[1]")
_FLOATS: Final = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-38, 3e38, float("inf"), float("-inf"), float("nan"))
_COUNTS: Final = (0, 1, 2, 3, 16, 17, 21, 511, 512, 640, 2**31)
_VALUES: Final[dict[int, Sequence[object]]] = {
    FieldDescriptor.CPPTYPE_STRING: _TEXTS,
    FieldDescriptor.CPPTYPE_FLOAT: _FLOATS,
    FieldDescriptor.CPPTYPE_DOUBLE: _FLOATS,
    FieldDescriptor.CPPTYPE_INT32: (*_COUNTS[:-1], -1, 2**31 - 1, -(2**31)),
    FieldDescriptor.CPPTYPE_INT64: (*_COUNTS, -1, 2**32, 2**63 - 1, -(2**63)),
    FieldDescriptor.CPPTYPE_UINT32: (*_COUNTS, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (*_COUNTS, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (0, 1, 2, 3, 99, -1, 2**31 - 1),
    FieldDescriptor.CPPTYPE_BOOL: (False, True),
}
_MANY: Final = (1, 2, 17, 65, 1100)


def odd_bytes(rng: random.Random, good: Message) -> bytes:
    """A message that went through some changes, on the wire."""
    changed: Any = type(good)()
    changed.CopyFrom(good)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        _change(rng, rng.choice(list(_messages(changed))))
    data: bytes = changed.SerializeToString()
    return rng.choice(_ON_BYTES)(rng, data) if rng.random() < 0.3 else data


def _messages(message: Any) -> Iterator[Any]:
    """It and all that are in it."""
    yield message
    for item, value in message.ListFields():
        if item.message_type is None or _is_map(item):
            continue
        for inner in list(value)[:20] if item.is_repeated else [value]:
            yield from _messages(inner)


def _is_map(item: Any) -> bool:
    return item.message_type is not None and item.message_type.GetOptions().map_entry


def _change(rng: random.Random, message: Any) -> None:
    """One field of it."""
    fields = list(message.DESCRIPTOR.fields)
    if not fields:
        return
    item = rng.choice(fields)
    held = getattr(message, item.name)
    if rng.random() < 0.2:
        message.ClearField(item.name)
    elif _is_map(item):
        _put(rng, item, held)
    elif item.is_repeated:
        for _ in range(rng.choice(_MANY)):
            if item.message_type is None:
                held.append(_value(rng, item))
            elif held and rng.random() < 0.5:
                held.add().CopyFrom(held[0])
            else:
                held.add()
    elif item.message_type is not None:
        held.SetInParent()
    else:
        setattr(message, item.name, _value(rng, item))


def _put(rng: random.Random, item: Any, held: Any) -> None:
    key, value = item.message_type.fields_by_name["key"], item.message_type.fields_by_name["value"]
    for _ in range(rng.choice((1, 3))):
        if value.message_type is None:
            held[_value(rng, key)] = _value(rng, value)
        else:
            _change(rng, held[_value(rng, key)])


def _value(rng: random.Random, item: Any) -> Any:
    chosen: Any = rng.choice(_VALUES[item.cpp_type])
    return chosen.encode() if item.type == FieldDescriptor.TYPE_BYTES else chosen


def _truncated(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _flipped(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data or b"\0")
    for _ in range(rng.randint(1, 4)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def _with_unknown(rng: random.Random, data: bytes) -> bytes:
    """A varint, a text and a group that nobody knows, or a wire type that does not exist."""
    return data + rng.choice((b"\xf8\x3f\x05", b"\xfa\x3f\x02ab", b"\xfb\x3f\xfc\x3f", b"\xff\x3f"))


def _nested(rng: random.Random, data: bytes) -> bytes:
    """Field 3 in field 3, more often than a parser goes in."""
    inner = b""
    for _ in range(rng.choice((20, 120))):
        head, length = b"\x1a", len(inner)
        while length > 127:
            head += bytes([length % 128 + 128])
            length //= 128
        inner = head + bytes([length]) + inner
    return data + inner


def _noise(rng: random.Random, data: bytes) -> bytes:
    return rng.randbytes(rng.choice((0, 1, 20, len(data))))


_ON_BYTES: Final = (_truncated, _flipped, _with_unknown, _nested, _noise)
