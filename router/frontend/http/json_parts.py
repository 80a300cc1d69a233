"""JSON as text: at once, or in parts between which other work is done. Pure."""

import json
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

T = TypeVar("T")

_to_text: Final[Callable[[object], str]] = json.JSONEncoder(
    ensure_ascii=False, separators=(",", ":")
).encode
_NESTED: Final = (dict, list, tuple, array)
_LINE_ENDS: Final = {end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
_NUM_AT_ONCE: Final = 1024  # values that are written in one go: less than a millisecond
_AN_ITEM: Final = 128  # values that one of ``SmallItems`` counts for
_A_VALUE: Final = 32  # characters of a text that take as long
_TEXT_AT_ONCE: Final = 8192  # characters of a text, which JSON may write with six each
CHARACTERS_A_TURN: Final = 32_768
"""Of JSON: about a millisecond."""


class SmallItems(list[T]):
    """A list whose items are all small, so that nobody has to look: all of one token, say."""


def encode(content: object) -> str:
    """JSON in one line, for those too who take more for a line's end than JSON does."""
    return in_one_line(_to_text(content))


def in_one_line(text: str) -> str:
    """JSON whose texts may have what some take for a line's end."""
    if not text.isascii():
        for end, escaped in _LINE_ENDS.items():
            text = text.replace(end, escaped)
    return text


def json_parts(content: object) -> Iterator[str]:
    """A body in parts, each written in a moment: what calls may do other work in between.

    Numbers may be an array, which takes an eighth of a list of them.
    """
    if _left(content, _NUM_AT_ONCE) > 0:
        yield encode(content)
    elif isinstance(content, dict):
        begin = "{"
        for name, value in content.items():
            yield f"{begin}{encode(name)}:"
            yield from json_parts(value)
            begin = ","
        yield "}"
    elif isinstance(content, str):
        yield '"'
        for start in range(0, len(content), _TEXT_AT_ONCE):
            yield encode(content[start : start + _TEXT_AT_ONCE])[1:-1]
        yield '"'
    elif isinstance(content, SmallItems):
        yield from _in_slices(content, _NUM_AT_ONCE // _AN_ITEM or 1)
    elif isinstance(content, list | tuple) and _is_deep(content):
        begin = "["
        for value in content:
            yield begin
            yield from json_parts(value)
            begin = ","
        yield "]"
    else:
        assert isinstance(content, list | tuple | array), "any other is written at once"
        yield from _in_slices(content, _NUM_AT_ONCE)


def pieces(parts: Iterable[str]) -> Iterator[bytes]:
    """The parts as pieces of ``CHARACTERS_A_TURN`` or a little more, the last of what is left."""
    kept: list[str] = []
    num_characters = 0
    for part in parts:
        kept.append(part)
        num_characters += len(part)
        if num_characters >= CHARACTERS_A_TURN:
            yield "".join(kept).encode()
            kept, num_characters = [], 0
    if num_characters:
        yield "".join(kept).encode()


def _in_slices(
    content: "list[object] | tuple[object, ...] | array[float]", num_at_once: int
) -> Iterator[str]:
    begin = "["
    for start in range(0, len(content), num_at_once):
        yield f"{begin}{encode(list(content[start : start + num_at_once]))[1:-1]}"
        begin = ","
    yield "]" if content else "[]"


def _is_deep(values: Iterable[object]) -> bool:
    return any(
        len(value) > _A_VALUE if isinstance(value, str) else isinstance(value, _NESTED)
        for value in values
    )


def _left(content: object, left: int) -> int:
    """What is left of so many values without those of ``content``; 0 or less: it has more.

    An array is more in any case: it is written as lists.
    """
    if isinstance(content, str):
        return left - 1 - len(content) // _A_VALUE
    if isinstance(content, array):
        return 0
    if isinstance(content, SmallItems):
        return left - _AN_ITEM * len(content)
    if not isinstance(content, dict | list | tuple):
        return left - 1
    left -= len(content)
    for value in content.values() if isinstance(content, dict) else content:
        if left <= 0:
            break
        if isinstance(value, (str, *_NESTED)):
            left = _left(value, left)
    return left
