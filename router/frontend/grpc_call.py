"""What front ends over gRPC know of a call, and how they read a request."""

import time
from typing import Any, NamedTuple, TypeVar

from google.protobuf.message import Message

from diptych.errors import InvalidRequestError
from diptych.rpc.decoding import decode
from diptych.rpc.item_counts import check_item_counts
from diptych.rpc.server import Context
from diptych.telemetry.tracing import Metadata
from diptych.tenant import Tenant
from router.frontend.callers.callers import Callers, authorization
from router.frontend.handed_over import FREE_BYTES, HandedOver

M = TypeVar("M", bound=Message)


class Call(NamedTuple):
    """What is known of a call beside its request."""

    deadline_s: float | None  # a moment of the monotonic clock
    metadata: Metadata

    @classmethod
    def of(cls, context: Context) -> "Call":
        """From now on."""
        remaining_s = context.time_remaining()
        deadline_s = None if remaining_s is None else time.monotonic() + remaining_s
        return cls(deadline_s, tuple(context.invocation_metadata() or ()))

    async def tenant(self, callers: Callers) -> Tenant:
        """Whose it is. Raises InvalidApiKeyError."""
        return await callers.tenant(authorization(self.metadata))


def hand_over(message: M, context: Context, tenant: Tenant, handed: HandedOver) -> M:
    """The only message of a call whose tenant was admitted, counted until that is over."""
    num_bytes = message.ByteSize()
    if num_bytes > FREE_BYTES:
        release = handed.hold(tenant.name, num_bytes)
        untyped: Any = context  # the stubs want another kind of function than gRPC calls
        untyped.add_done_callback(lambda _: release())
    return message


def read_message(message_type: type[M], data: bytes, max_bytes: int) -> M:
    """Parse ``data``, unless it or what is in it is too large. Raises InvalidRequestError."""
    if len(data) > max_bytes:
        raise InvalidRequestError(f"has {len(data)} bytes, more than {max_bytes}", field="request")
    check_item_counts(message_type, data)
    return decode(message_type, data)
