"""Find the string field whose bytes are not UTF-8 in a message that did not parse.

protobuf refuses such a message whole and does not say where. This reparses it
with a twin of its descriptor in which every string is declared as bytes.
"""

from functools import cache

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from google.protobuf.message import DecodeError, Message

MAX_SEARCHED = 16384

_BYTES = descriptor_pb2.FieldDescriptorProto.TYPE_BYTES
_STRING = descriptor_pb2.FieldDescriptorProto.TYPE_STRING


def invalid_utf8_field(descriptor: Descriptor, data: bytes) -> str | None:
    """Path of the first string field with invalid UTF-8, such as ``sampling.stop[0]``.

    None if ``data`` is not a ``descriptor`` message for another reason, or if the
    string is not among the first MAX_SEARCHED strings and messages.
    """
    try:
        twin = _twin_class(descriptor).FromString(data)
    except DecodeError:
        return None
    return _Search(MAX_SEARCHED).find(descriptor, twin)


@cache
def _twin_class(descriptor: Descriptor) -> type[Message]:
    pool = descriptor_pool.DescriptorPool()
    _add_twin_file(pool, descriptor.file, set())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(descriptor.full_name))


def _add_twin_file(
    pool: descriptor_pool.DescriptorPool, file: FileDescriptor, added: set[str]
) -> None:
    if file.name in added:
        return
    added.add(file.name)
    for dependency in file.dependencies:
        _add_twin_file(pool, dependency, added)
    proto = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(proto)
    for message in proto.message_type:
        _strings_to_bytes(message)
    pool.Add(proto)


def _strings_to_bytes(message: descriptor_pb2.DescriptorProto) -> None:
    if message.options.map_entry:
        return
    for field in message.field:
        if field.type == _STRING:
            field.type = _BYTES
    for nested in message.nested_type:
        _strings_to_bytes(nested)


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
            if inner is not None and inner.GetOptions().map_entry:
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
