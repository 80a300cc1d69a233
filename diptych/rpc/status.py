"""Domain errors as gRPC carries them, and back. Pure."""

from collections.abc import Mapping
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from diptych.errors import DOMAIN, DiptychError, InvalidRequestError
from diptych.v1 import common_pb2

_MOST_RETRY_S = 315_576_000_000  # that a Duration can say
MAX_MESSAGE_BYTES = 1024  # clients take trailers of 8 KiB; the message is in them several times


def to_status(error: DiptychError) -> status_pb2.Status:
    """Encode ``error`` as google.rpc.Status with ErrorInfo, BadRequest, RetryInfo.

    Texts, which may quote the client, are cut at MAX_MESSAGE_BYTES.
    """
    details: list[Message] = [
        error_details_pb2.ErrorInfo(
            reason=error.reason,
            domain=DOMAIN,
            metadata={name: _cut(value) for name, value in error.metadata.items()},
        )
    ]
    if isinstance(error, InvalidRequestError):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_cut(error.field), description=_cut(error.message)
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(code=error.code.value[0], message=_cut(error.message))
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def _cut(text: str) -> str:
    """Whole characters of its beginning; halves of characters become question marks."""
    return text.encode(errors="replace")[:MAX_MESSAGE_BYTES].decode(errors="ignore")


def to_failure(error: DiptychError) -> common_pb2.Failure:
    """Encode ``error`` for use inside a multiplexed stream; texts are cut as in ``to_status``."""
    return common_pb2.Failure(
        code=error.code.value[0],
        reason=error.reason,
        message=_cut(error.message),
        metadata={name: _cut(value) for name, value in error.metadata.items()},
        retry_after_s=error.retry_after_s,
    )


_CODES = {code.value[0]: code for code in grpc.StatusCode}


_NOTHING: Mapping[str, str] = {}


def remote_error(
    code: grpc.StatusCode,
    reason: str,
    message: str,
    retry_after_s: float | None = None,
    metadata: Mapping[str, str] = _NOTHING,
) -> DiptychError:
    """Rebuild the error of a peer: the class whose reason it is, else a plain one.

    A ``retry_after_s`` that is no time to wait was not said.
    """
    error = _of_reason(code, reason, message)
    if retry_after_s is not None and 0.0 <= retry_after_s <= _MOST_RETRY_S:
        error.retry_after_s = retry_after_s
    error.metadata = {**error.metadata, **metadata}
    return error


def _of_reason(code: grpc.StatusCode, reason: str, message: str) -> DiptychError:
    reason = reason or code.name  # as where a call's own time is over before its server says so
    if reason == InvalidRequestError.reason:
        field, _, rest = message.partition(": ")
        return InvalidRequestError(rest or message, field=field if rest else "request")
    for cls in DiptychError.__subclasses__():
        has_own_reason = "reason" in cls.__dict__  # else it never crosses the wire
        if has_own_reason and cls.reason == reason:
            return cls(message)
    error = DiptychError(message)
    error.code, error.reason = code, reason  # type: ignore[misc]
    return error


def from_failure(failure: common_pb2.Failure) -> DiptychError:
    """Inverse of :func:`to_failure`."""
    retry_after_s = failure.retry_after_s if failure.HasField("retry_after_s") else None
    code = _CODES.get(failure.code, grpc.StatusCode.UNKNOWN)
    return remote_error(
        code, failure.reason, failure.message, retry_after_s, dict(failure.metadata)
    )


def from_rpc_error(error: grpc.RpcError) -> DiptychError:
    """The domain error that a failed call carries (its ErrorInfo, else its code).

    Details that do not parse are as none: the code and the text still say what failed.
    """
    if not isinstance(error, grpc.aio.AioRpcError):
        return DiptychError(str(error))
    try:
        info, retry_after_s = _details(error)
    except DecodeError:
        info, retry_after_s = error_details_pb2.ErrorInfo(), None
    return remote_error(
        error.code(), info.reason, error.details() or "", retry_after_s, dict(info.metadata)
    )


def _details(error: grpc.aio.AioRpcError) -> tuple[error_details_pb2.ErrorInfo, float | None]:
    """What went with a status, and after how many seconds to try again. Raises DecodeError."""
    info, retry_after_s = error_details_pb2.ErrorInfo(), None
    trailing: Any = error.trailing_metadata() or ()
    for key, value in trailing:
        if key != "grpc-status-details-bin" or not isinstance(value, bytes):
            continue
        for detail in status_pb2.Status.FromString(value).details:
            retry = error_details_pb2.RetryInfo()
            if detail.Unpack(retry):
                retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
            else:
                detail.Unpack(info)
    return info, retry_after_s
