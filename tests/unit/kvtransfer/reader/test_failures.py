"""What the end of a stream means for a pull."""

import grpc
import pytest

from diptych.errors import (
    BlocksExhaustedError,
    DiptychError,
    KVUnprovenError,
    LayoutMismatchError,
    LeaseExpiredError,
    TicketInvalidError,
    TransferInterruptedError,
)
from diptych.rpc.status import remote_error
from diptych.v1 import decode_pb2
from kvtransfer.errors import AgentLostError, AgentTakenError, SourceLostError, TransportError
from kvtransfer.reader.failures import connect_failure, read_failure, stream_failure
from kvtransfer.reader.pull_machine import PullError

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


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (TicketInvalidError("x"), decode_pb2.PULL_FAILURE_TICKET_INVALID),
        (LeaseExpiredError("x"), decode_pb2.PULL_FAILURE_TICKET_INVALID),
        (KVUnprovenError("x"), decode_pb2.PULL_FAILURE_UNPROVEN),
        (LayoutMismatchError("x"), decode_pb2.PULL_FAILURE_LAYOUT),
        (TransferInterruptedError("x"), decode_pb2.PULL_FAILURE_SOURCE_LOST),
        (BlocksExhaustedError("x"), decode_pb2.PULL_FAILURE_TRANSPORT),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_source_that_says_why_is_taken_at_its_word(
    error: DiptychError, failure: decode_pb2.PullFailure
) -> None:
    """The router does another thing for each of these."""
    failed = stream_failure(error)
    assert (failed.failure, failed.refusal) == (failure, error.reason)


def test_a_source_whose_agent_is_rebuilt_is_connected_to_again() -> None:
    failed = connect_failure(TransferInterruptedError("x"))
    assert isinstance(failed, PullError)
    assert failed.failure == decode_pb2.PULL_FAILURE_TRANSPORT
    assert failed.agent_lost
    other = LayoutMismatchError("x")
    assert connect_failure(other) is other


def test_a_read_that_finds_no_agent_asks_for_another_one() -> None:
    failed = read_failure(SourceLostError("x"))
    assert failed.failure == decode_pb2.PULL_FAILURE_SOURCE_LOST
    assert failed.agent_lost
    assert not failed.took_agent


def test_a_source_that_took_our_agent_is_to_blame_and_one_that_only_lost_it_is_not() -> None:
    for error in (TransportError("x"), AgentLostError("x"), AgentTakenError("x")):
        failed = read_failure(error)
        assert failed.failure == decode_pb2.PULL_FAILURE_TRANSPORT
        assert failed.agent_lost is isinstance(error, AgentLostError)
        assert failed.took_agent is isinstance(error, AgentTakenError)


@pytest.mark.parametrize("kind", [SourceLostError, TransportError])
def test_whether_our_agent_had_to_end_for_a_read_is_told_on(kind: type[TransportError]) -> None:
    error = kind("x")
    assert not read_failure(error).broke_agent
    error.broke_agent = True
    assert read_failure(error).broke_agent
