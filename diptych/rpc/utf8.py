"""Find the string field whose bytes are not UTF-8 in a message that did not parse.

protobuf refuses such a message whole and does not say where. This reparses it
as its twin, in which every string is declared as bytes.
"""

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from diptych.rpc.twin import is_map_entry, twin_class

MAX_SEARCHED = 16384


def invalid_utf8_field(descriptor: Descriptor, data: bytes) -> str | None:
    """Path of the first string field with invalid UTF-8, such as ``sampling.stop[0]``.

    None if ``data`` is not a ``descriptor`` message for another reason, or if the
    string is not among the first MAX_SEARCHED strings and messages.
    """
    try:
        twin = twin_class(descriptor).FromString(data)
    except DecodeError:
        return None
    return _Search(MAX_SEARCHED).find(descriptor, twin)


class _Search:
    """One walk through a message that holds strings as bytes; it ends after so many values.

    Only strings and messages are looked at: token ids, of which there may be
    millions, cost nothing.
    """

    def __init__(self, max_values: int) -> None:
        self._num_left = max_values

    def find(self, descriptor: Descriptor, twin: Message) -> str | None:
        """Path, within ``twin``, of the first string that is not UTF-8."""
        for field, value in twin.ListFields():
            original = descriptor.fields_by_number[field.number]
            inner = original.message_type
            if inner is None and original.type != FieldDescriptor.TYPE_STRING:
                continue
            if inner is not None and is_map_entry(inner):
                continue
            for index, item in enumerate(value if field.is_repeated else (value,)):
                if self._num_left == 0:
                    return None
                self._num_left -= 1
                rest = self._find_in(inner, item)
                if rest is not None:
                    return field.name + (f"[{index}]" if field.is_repeated else "") + rest
        return None

    def _find_in(self, descriptor: Descriptor | None, item: object) -> str | None:
        """The path from ``item`` on: empty if it is the string itself."""
        if descriptor is not None and isinstance(item, Message):
            found = self.find(descriptor, item)
            return None if found is None else f".{found}"
        return "" if isinstance(item, bytes) and not _is_utf8(item) else None


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True
