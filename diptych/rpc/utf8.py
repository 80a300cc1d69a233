"""Find the string field whose bytes are not UTF-8 in a message that did not parse.

protobuf refuses such a message whole and does not say where. This reparses it
with a twin of its descriptor in which every string is declared as bytes.
"""

from functools import cache

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from google.protobuf.message import DecodeError, Message

_BYTES = descriptor_pb2.FieldDescriptorProto.TYPE_BYTES
_STRING = descriptor_pb2.FieldDescriptorProto.TYPE_STRING


def invalid_utf8_field(descriptor: Descriptor, data: bytes) -> str | None:
    """Path of the first string field with invalid UTF-8, such as ``sampling.stop[0]``.

    None if ``data`` is not a ``descriptor`` message for another reason.
    """
    try:
        twin = _twin_class(descriptor).FromString(data)
    except DecodeError:
        return None
    return _search(descriptor, twin, "")


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


def _search(descriptor: Descriptor, twin: Message, prefix: str) -> str | None:
    for field, value in twin.ListFields():
        original = descriptor.fields_by_number[field.number]
        values = list(value) if field.is_repeated else [value]
        for index, item in enumerate(values):
            path = f"{prefix}{field.name}" + (f"[{index}]" if field.is_repeated else "")
            if original.type == FieldDescriptor.TYPE_STRING and not _is_utf8(item):
                return path
            if original.message_type is not None and isinstance(item, Message):
                found = _search(original.message_type, item, f"{path}.")
                if found is not None:
                    return found
    return None


def _is_utf8(value: bytes | str) -> bool:
    if isinstance(value, str):
        return True
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True
