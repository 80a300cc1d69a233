"""Bounds how many items a message has before it is parsed.

protobuf's maps are fast for keys that come in any order. A client may send those for which they
are slow: in the order of another map's table, or such that all fall into one place of it. Then an
entry costs as much as there are entries, while nothing else runs; and an empty message in a list
costs two bytes to send and many to hold. So what is large is first read as its twin, in which
they are bytes.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, Final

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

from diptych.errors import InvalidRequestError
from diptych.rpc.twin import is_map_entry, twin_class

MAX_ENTRIES: Final = 4096
"""Of one map."""

MAX_NESTED_BYTES: Final = 2**20
"""Of all maps together whose values may hold maps, which are not looked into."""

MAX_ITEMS: Final = 32_768
"""Messages in lists, all together."""

MIN_CHECKED_BYTES: Final = 16_384
"""A smaller message has too few items for harm."""


def check_item_counts(message_type: type[Message], data: bytes) -> None:
    """Refuse a message that would take long to parse.

    Raises InvalidRequestError: a map or a list is too large, or this is no such message.
    """
    descriptor: Any = message_type.DESCRIPTOR  # the stubs know two kinds
    if len(data) >= MIN_CHECKED_BYTES and _holds_many(descriptor):
        _Walk().check(descriptor, data)


class _Walk:
    """One walk through a message, to all its lists and maps but those within maps."""

    def __init__(self) -> None:
        self._num_items = 0
        self._num_nested_bytes = 0

    def check(self, descriptor: Descriptor, data: bytes, path: str = "") -> None:
        """Raise InvalidRequestError, with the path from the whole message to what is too large."""
        try:
            twin = twin_class(descriptor, is_shallow=True).FromString(data)
        except DecodeError:
            raise InvalidRequestError("not valid protobuf", field="request") from None
        self._check_fields(descriptor, twin, path)

    def _check_fields(self, descriptor: Descriptor, twin: Message, path: str) -> None:
        for field, value in twin.ListFields():
            original = descriptor.fields_by_number[field.number]
            inner, name = original.message_type, path + field.name
            if inner is None:
                continue
            if is_map_entry(inner):
                self._check_map(inner, value, name)
            elif original.is_repeated:
                self._check_list(inner, value, name)
            elif _holds_many(inner):
                self._check_fields(inner, value, f"{name}.")

    def _check_map(self, entry: Descriptor, entries: Sequence[bytes], name: str) -> None:
        if len(entries) > MAX_ENTRIES:
            raise InvalidRequestError(
                f"has {len(entries)} items, more than {MAX_ENTRIES}", field=name
            )
        held = entry.fields_by_name["value"].message_type
        if held is None or not _holds_many(held):
            return
        self._num_nested_bytes += sum(map(len, entries))
        if self._num_nested_bytes > MAX_NESTED_BYTES:
            raise InvalidRequestError(
                f"has, with those before it, more than {MAX_NESTED_BYTES} bytes", field=name
            )

    def _check_list(self, inner: Descriptor, items: Sequence[bytes], name: str) -> None:
        self._num_items += len(items)
        if self._num_items > MAX_ITEMS:
            raise InvalidRequestError(
                f"has {len(items)} items, with those before it more than {MAX_ITEMS}", field=name
            )
        if _holds_many(inner):
            for index, item in enumerate(items):
                self.check(inner, item, f"{name}[{index}].")


@cache
def _holds_many(descriptor: Descriptor) -> bool:
    """Whether there is a map or a list of messages in it, however deep."""
    seen, left = {descriptor.full_name}, [descriptor]
    while left:
        for field in left.pop().fields:
            inner = field.message_type
            if inner is not None and field.is_repeated:
                return True
            if inner is not None and inner.full_name not in seen:
                seen.add(inner.full_name)
                left.append(inner)
    return False
