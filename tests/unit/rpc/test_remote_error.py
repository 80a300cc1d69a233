"""Errors of a peer, rebuilt from what crossed the wire."""

import math

import grpc
import pytest

from diptych.errors import (
    BlocksExhaustedError,
    DiptychError,
    InvalidRequestError,
    NoWorkerError,
)
from diptych.rpc.status import (
    MAX_MESSAGE_BYTES,
    from_failure,
    from_rpc_error,
    remote_error,
    to_failure,
    to_status,
)
from diptych.v1 import decode_pb2
from kvtransfer.reader.pull_machine import PullError


@pytest.mark.parametrize(
    "error",
    [
        DiptychError("internal error 4f"),
        BlocksExhaustedError("full", retry_after_s=2.0, needed="7", free="3"),
        InvalidRequestError("is empty", field="tokens"),
    ],
)
def test_an_error_keeps_its_class(error: DiptychError) -> None:
    back = from_failure(to_failure(error))
    assert type(back) is type(error)
    assert (back.code, back.reason, back.message) == (error.code, error.reason, error.message)
    assert back.retry_after_s == error.retry_after_s
    assert back.metadata == error.metadata


def test_an_invalid_request_names_its_field_or_is_wrong_as_a_whole() -> None:
    for message, field in (("max_tokens: is too large", "max_tokens"), ("is empty", "request")):
        back = remote_error(grpc.StatusCode.INVALID_ARGUMENT, InvalidRequestError.reason, message)
        assert isinstance(back, InvalidRequestError)
        assert (back.field, back.message) == (field, f"{field}: {message.rpartition(': ')[2]}")


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, -1.0, 1e300])
def test_what_is_no_time_to_wait_was_not_said(seconds: float) -> None:
    failure = to_failure(BlocksExhaustedError("full"))
    failure.retry_after_s = seconds
    back = from_failure(failure)
    assert back.retry_after_s is None
    assert len(to_status(back).details) == 1, "no RetryInfo"


@pytest.mark.parametrize("seconds", [0.0, 315_576_000_000.0])
def test_any_time_to_wait_that_can_be_said_is_told_on(seconds: float) -> None:
    failure = to_failure(BlocksExhaustedError("full", retry_after_s=seconds))
    back = from_failure(failure)
    assert back.retry_after_s == seconds
    assert len(to_status(back).details) == 2


def test_a_class_without_a_reason_of_its_own_stays_here() -> None:
    error = PullError(decode_pb2.PULL_FAILURE_TRANSPORT, "broken")
    back = remote_error(grpc.StatusCode.INTERNAL, error.reason, error.message)
    assert type(back) is DiptychError
    assert back.reason == "INTERNAL"


def test_metadata_of_a_failed_call_comes_back() -> None:
    status = to_status(BlocksExhaustedError("full", retry_after_s=2.0, needed="7"))
    trailing = grpc.aio.Metadata(("grpc-status-details-bin", status.SerializeToString()))
    failed = grpc.aio.AioRpcError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.aio.Metadata(),
        trailing,
        details="full",
        debug_error_string=None,
    )
    back = from_rpc_error(failed)
    assert isinstance(back, BlocksExhaustedError)
    assert (back.retry_after_s, back.metadata) == (2.0, {"needed": "7"})


@pytest.mark.parametrize("letter", ["x", "€", "\ud800"])
def test_texts_are_cut_to_fit_the_trailers(letter: str) -> None:
    error = InvalidRequestError(letter * 9000, field=letter * 9000)
    status = to_status(error)
    assert len(status.message.encode()) in range(MAX_MESSAGE_BYTES - 3, MAX_MESSAGE_BYTES + 1)
    assert status.message == error.message[: len(status.message)].replace("\ud800", "?")
    assert status.ByteSize() < 5 * MAX_MESSAGE_BYTES
    error.metadata = {"detail": letter * 9000}
    failure = to_failure(error)
    assert failure.message == status.message
    assert failure.ByteSize() < 3 * MAX_MESSAGE_BYTES


def test_metadata_may_have_any_key() -> None:
    metadata = {"message": "an argument's name", "retry_after_s": "x", "": ""}
    back = remote_error(grpc.StatusCode.UNAVAILABLE, "NO_WORKER", "none", 1.0, metadata)
    assert isinstance(back, NoWorkerError)
    assert (back.message, back.retry_after_s, back.metadata) == ("none", 1.0, metadata)


@pytest.mark.parametrize("details", [b"\xff\xff", b"\x1a\x02\xff\xff"])
def test_details_that_do_not_parse_leave_the_code_and_the_text(details: bytes) -> None:
    trailing = grpc.aio.Metadata(("grpc-status-details-bin", details))
    failed = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), trailing, "gone", None
    )
    back = from_rpc_error(failed)
    assert (back.code, back.message) == (grpc.StatusCode.UNAVAILABLE, "gone")
    assert (back.reason, back.retry_after_s, back.metadata) == ("UNAVAILABLE", None, {})
