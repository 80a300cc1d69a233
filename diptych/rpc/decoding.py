"""Wire bytes to messages, with a typed error for what is none."""

from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from diptych.errors import InvalidRequestError
from diptych.rpc.utf8 import invalid_utf8_field

M = TypeVar("M", bound=Message)


def decode(message_type: type[M], data: bytes) -> M:
    """Parse ``data``.

    Raises:
        InvalidRequestError: it is no such message; names the field if the reason is a
            string that is not UTF-8.
    """
    try:
        return message_type.FromString(data)
    except DecodeError:
        descriptor: Any = message_type.DESCRIPTOR  # the stubs know two kinds
        field = invalid_utf8_field(descriptor, data)
        if field is None:
            raise InvalidRequestError("not valid protobuf", field="request") from None
        raise InvalidRequestError("not valid UTF-8", field=field) from None
