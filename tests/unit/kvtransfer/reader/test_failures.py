"""What the end of a stream means for a pull."""

import grpc
import pytest

from diptych.errors import LeaseExpiredError
from diptych.rpc.status import remote_error
from diptych.v1 import decode_pb2
from kvtransfer.errors import AgentLostError, AgentTakenError, TransportError
from kvtransfer.reader.failures import read_failure, stream_failure

CODES = [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK]
OF_A_LOST_SOURCE = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
}


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
def test_a_code_alone_says_whether_the_source_is_lost(code: grpc.StatusCode) -> None:
    failed = stream_failure(remote_error(code, "", "as told"))
    lost, other = decode_pb2.PULL_FAILURE_SOURCE_LOST, decode_pb2.PULL_FAILURE_TRANSPORT
    assert failed.failure == (lost if code in OF_A_LOST_SOURCE else other)
    assert failed.refusal == code.name
    assert "as told" in str(failed)


def test_a_stream_that_ends_without_a_reason_is_a_lost_source() -> None:
    broken = remote_error(grpc.StatusCode.INTERNAL, "", "Internal error from Core", None)
    assert stream_failure(broken).failure == decode_pb2.PULL_FAILURE_SOURCE_LOST
    expired = stream_failure(LeaseExpiredError("the lease has ended"))
    assert expired.failure == decode_pb2.PULL_FAILURE_TICKET_INVALID
    assert expired.refusal == "LEASE_EXPIRED"


def test_a_source_that_took_our_agent_is_to_blame_and_one_that_only_lost_it_is_not() -> None:
    for error in (TransportError("x"), AgentLostError("x"), AgentTakenError("x")):
        failed = read_failure(error)
        assert failed.failure == decode_pb2.PULL_FAILURE_TRANSPORT
        assert failed.agent_lost is isinstance(error, AgentLostError)
        assert failed.took_agent is isinstance(error, AgentTakenError)
