"""What the end of a stream means for a pull."""

import grpc

from diptych.errors import LeaseExpiredError
from diptych.rpc.status import remote_error
from diptych.v1 import decode_pb2
from kvtransfer.reader.failures import stream_failure


def test_a_stream_that_ends_without_a_reason_is_a_lost_source() -> None:
    broken = remote_error(grpc.StatusCode.INTERNAL, "", "Internal error from Core", None)
    assert stream_failure(broken).failure == decode_pb2.PULL_FAILURE_SOURCE_LOST
    expired = stream_failure(LeaseExpiredError("the lease has ended"))
    assert expired.failure == decode_pb2.PULL_FAILURE_TICKET_INVALID
    assert expired.refusal == "LEASE_EXPIRED"
