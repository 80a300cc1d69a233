"""Errors of a peer, rebuilt from what crossed the wire."""

import grpc
import pytest

from diptych.errors import BlocksExhaustedError, DiptychError, InvalidRequestError
from diptych.rpc.status import from_failure, remote_error, to_failure
from diptych.v1 import decode_pb2
from kvtransfer.reader.pull_machine import PullError


@pytest.mark.parametrize(
    "error",
    [
        DiptychError("internal error 4f"),
        BlocksExhaustedError("full", retry_after_s=2.0),
        InvalidRequestError("is empty", field="tokens"),
    ],
)
def test_an_error_keeps_its_class(error: DiptychError) -> None:
    back = from_failure(to_failure(error))
    assert type(back) is type(error)
    assert (back.code, back.reason, back.message) == (error.code, error.reason, error.message)
    assert back.retry_after_s == error.retry_after_s


def test_a_class_without_a_reason_of_its_own_stays_here() -> None:
    error = PullError(decode_pb2.PULL_FAILURE_TRANSPORT, "broken")
    back = remote_error(grpc.StatusCode.INTERNAL, error.reason, error.message)
    assert type(back) is DiptychError
    assert back.reason == "INTERNAL"
