"""What a failed stream or read means for a pull. The only place that maps them."""

import grpc

from diptych.errors import (
    DiptychError,
    KVUnprovenError,
    LayoutMismatchError,
    LeaseExpiredError,
    TicketInvalidError,
    TransferInterruptedError,
)
from diptych.v1 import decode_pb2
from kvtransfer.errors import AgentLostError, AgentTakenError, SourceLostError, TransportError
from kvtransfer.reader.pull_machine import PullError

_FAILURES: dict[type[DiptychError], decode_pb2.PullFailure] = {
    TicketInvalidError: decode_pb2.PULL_FAILURE_TICKET_INVALID,
    LeaseExpiredError: decode_pb2.PULL_FAILURE_TICKET_INVALID,
    KVUnprovenError: decode_pb2.PULL_FAILURE_UNPROVEN,
    LayoutMismatchError: decode_pb2.PULL_FAILURE_LAYOUT,
    TransferInterruptedError: decode_pb2.PULL_FAILURE_SOURCE_LOST,
}
_LOST_CODES = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
}


def stream_failure(error: DiptychError) -> PullError:
    """How a pull fails when its stream ended with ``error``."""
    lost = error.code in _LOST_CODES  # a source that is there says Ended before it ends a stream
    other = decode_pb2.PULL_FAILURE_SOURCE_LOST if lost else decode_pb2.PULL_FAILURE_TRANSPORT
    failure = _FAILURES.get(type(error), other)
    return PullError(failure, f"{error.reason}: {error.message}", refusal=error.reason)


def connect_failure(error: DiptychError) -> DiptychError:
    """What it means that a source answered Connect with ``error``."""
    if isinstance(error, TransferInterruptedError):  # its agent is being rebuilt
        failure = decode_pb2.PULL_FAILURE_TRANSPORT
        return PullError(failure, error.message, refusal=error.reason, agent_lost=True)
    return error


def read_failure(error: TransportError) -> PullError:
    """How a pull fails when one of its reads ended with ``error``.

    The process that was read from is the source's agent: its end is not the source's.
    """
    if isinstance(error, SourceLostError):
        return PullError(
            decode_pb2.PULL_FAILURE_SOURCE_LOST,
            str(error),
            agent_lost=True,
            broke_agent=error.broke_agent,
        )
    return PullError(
        decode_pb2.PULL_FAILURE_TRANSPORT,
        str(error),
        agent_lost=isinstance(error, AgentLostError),
        took_agent=isinstance(error, AgentTakenError),
        broke_agent=error.broke_agent,
    )
