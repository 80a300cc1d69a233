"""Twins of message types: the same wire format, read without looking into all that there is."""

from functools import cache

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FileDescriptor
from google.protobuf.message import Message

_BYTES = descriptor_pb2.FieldDescriptorProto.TYPE_BYTES
_STRING = descriptor_pb2.FieldDescriptorProto.TYPE_STRING
_MESSAGE = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE
_REPEATED = descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED


@cache
def twin_class(descriptor: Descriptor, *, is_shallow: bool = False) -> type[Message]:
    """A message whose strings are bytes, and whose maps are repeated bytes, one for each entry.

    Of a shallow one lists of messages are repeated bytes, too.
    """
    pool = descriptor_pool.DescriptorPool()
    _add_twin_file(pool, descriptor.file, set(), is_shallow=is_shallow)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(descriptor.full_name))


def is_map_entry(descriptor: Descriptor) -> bool:
    """Whether it is what protobuf makes for each entry of a map."""
    return descriptor.GetOptions().map_entry


def _add_twin_file(
    pool: descriptor_pool.DescriptorPool,
    file: FileDescriptor,
    added: set[str],
    *,
    is_shallow: bool,
) -> None:
    if file.name in added:
        return
    added.add(file.name)
    for dependency in file.dependencies:
        _add_twin_file(pool, dependency, added, is_shallow=is_shallow)
    proto = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(proto)
    for message in proto.message_type:
        _to_bytes(message, f".{proto.package}", is_shallow=is_shallow)
    pool.Add(proto)


def _to_bytes(message: descriptor_pb2.DescriptorProto, scope: str, *, is_shallow: bool) -> None:
    """What the twin does not look into; ``scope`` is what the message lies in."""
    name = f"{scope}.{message.name}"
    entries = {f"{name}.{each.name}" for each in message.nested_type if each.options.map_entry}
    for field in message.field:
        is_list = field.type == _MESSAGE and field.label == _REPEATED
        if field.type == _STRING or field.type_name in entries or (is_shallow and is_list):
            field.type = _BYTES
            field.ClearField("type_name")
    kept = [each for each in message.nested_type if not each.options.map_entry]
    del message.nested_type[:]
    message.nested_type.extend(kept)
    for nested in message.nested_type:
        _to_bytes(nested, name, is_shallow=is_shallow)
