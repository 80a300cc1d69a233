"""What the end of a stream means for a pull."""

import grpc

from diptych.errors import LeaseExpiredError
from diptych.rpc import remote_error
from diptych.v1 import decode_pb2
from kvtransfer.failures import stream_failure


def test_a_status_that_grpc_lost_is_not_taken_for_a_lost_source() -> None:
    """A message sent while the source ends the stream costs its status, not the pair."""
    overtaken = remote_error(grpc.StatusCode.INTERNAL, "", "Internal error from Core", None)
    error = stream_failure(overtaken)
    assert error.failure == decode_pb2.PULL_FAILURE_TRANSPORT
    assert error.refusal
    broken = stream_failure(remote_error(grpc.StatusCode.INTERNAL, "", "internal error 1a2b", None))
    assert broken.failure == decode_pb2.PULL_FAILURE_SOURCE_LOST
    expired = stream_failure(LeaseExpiredError("the lease has ended"))
    assert expired.failure == decode_pb2.PULL_FAILURE_TICKET_INVALID
