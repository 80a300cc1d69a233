"""gRPC plumbing that every process shares: channels, servers, rich errors.

Liveness: HTTP/2 keepalive finds a dead or stopped process in about three
seconds, but only with all of the options below set (measured; a misspelt option
is silently ignored). It does not prove that the event loop or the engine behind
it is alive: heartbeats do.
"""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from diptych.errors import DOMAIN, DiptychError, InvalidRequestError
from diptych.timers import Timers
from diptych.utf8 import invalid_utf8_field
from diptych.v1 import common_pb2

logger = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
ChannelOptions: TypeAlias = list[tuple[str, int]]

MAX_MESSAGE_BYTES = 16 * 2**20

_TIMERS = Timers()
_SIZES: ChannelOptions = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]


def channel(address: str, timers: Timers = _TIMERS) -> grpc.aio.Channel:
    """Open a channel to a peer process of the cluster. The caller closes it."""
    options = [
        *_keepalive(timers),
        *_SIZES,
        # how long an attempt to connect may take: a peer on a busy machine answers late
        ("grpc.min_reconnect_backoff_ms", 2000),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    return grpc.aio.insecure_channel(address, options=options)


def server(timers: Timers = _TIMERS) -> grpc.aio.Server:
    """Make a server whose handlers may raise DiptychError. The caller starts it."""
    options = [
        *_keepalive(timers),
        *_SIZES,
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),
    ]
    return grpc.aio.server(interceptors=[ErrorInterceptor()], options=options)


def _keepalive(timers: Timers) -> ChannelOptions:
    answer_ms = int(1000 * timers.keepalive_answer_s)
    return [
        ("grpc.keepalive_time_ms", int(1000 * timers.keepalive_s)),
        ("grpc.keepalive_timeout_ms", answer_ms),
        ("grpc.http2.ping_timeout_ms", answer_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Translate a DiptychError raised by any handler; anything else is INTERNAL with an id.

    A request that is not valid protobuf becomes REQUEST_INVALID, naming the
    field if the reason is a string that is not UTF-8.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:  # unknown method: gRPC answers UNIMPLEMENTED
            return None
        codec = (_tolerant(handler.request_deserializer), handler.response_serializer)
        if handler.response_streaming:
            inner_stream = handler.stream_stream or handler.unary_stream

            async def stream(request: Any, context: Context) -> AsyncIterator[Message]:
                try:
                    _check_decoded(request)
                    async for response in inner_stream(request, context):
                        yield response
                except (asyncio.CancelledError, grpc.RpcError, GeneratorExit):
                    raise
                except Exception as error:  # noqa: BLE001 - the boundary of the process
                    await _abort(context, error, handler_call_details.method)

            if handler.request_streaming:
                return grpc.stream_stream_rpc_method_handler(stream, *codec)
            return grpc.unary_stream_rpc_method_handler(stream, *codec)

        inner_unary = handler.stream_unary or handler.unary_unary

        async def unary(request: Any, context: Context) -> Message:
            try:
                _check_decoded(request)
                response: Message = await inner_unary(request, context)
            except (asyncio.CancelledError, grpc.RpcError):
                raise
            except Exception as error:  # noqa: BLE001 - the boundary of the process
                await _abort(context, error, handler_call_details.method)
            return response

        if handler.request_streaming:
            return grpc.stream_unary_rpc_method_handler(unary, *codec)
        return grpc.unary_unary_rpc_method_handler(unary, *codec)


class _Undecodable:
    """Stands for a request that did not parse, until the handler can refuse it."""

    def __init__(self, error: InvalidRequestError) -> None:
        self.error = error


def _tolerant(deserializer: Any) -> Any:
    """Wrap ``Message.FromString`` so that a parse error becomes REQUEST_INVALID."""
    message_type = getattr(deserializer, "__self__", None)
    if message_type is None:
        return deserializer

    def deserialize(data: bytes) -> Any:
        try:
            return deserializer(data)
        except DecodeError:
            field = invalid_utf8_field(message_type.DESCRIPTOR, data)
            if field is None:
                return _Undecodable(InvalidRequestError("not valid protobuf", field="request"))
            return _Undecodable(InvalidRequestError("not valid UTF-8", field=field))

    return deserialize


def _check_decoded(request: Any) -> None:
    if isinstance(request, _Undecodable):
        raise request.error


def to_status(error: DiptychError) -> status_pb2.Status:
    """Encode ``error`` as google.rpc.Status with ErrorInfo, BadRequest, RetryInfo."""
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)
    ]
    if isinstance(error, InvalidRequestError):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=error.message
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(code=error.code.value[0], message=error.message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def to_failure(error: DiptychError) -> common_pb2.Failure:
    """Encode ``error`` for use inside a multiplexed stream."""
    return common_pb2.Failure(
        code=error.code.value[0],
        reason=error.reason,
        message=error.message,
        metadata=error.metadata,
        retry_after_s=error.retry_after_s,
    )


_CODES = {code.value[0]: code for code in grpc.StatusCode}


def remote_error(
    code: grpc.StatusCode, reason: str, message: str, retry_after_s: float | None = None
) -> DiptychError:
    """Rebuild the error of a peer: the class whose reason it is, else a plain one."""
    for cls in DiptychError.__subclasses__():
        has_own_reason = "reason" in cls.__dict__  # else it never crosses the wire
        if has_own_reason and cls.reason == reason and cls is not InvalidRequestError:
            return cls(message, retry_after_s=retry_after_s)
    if reason == InvalidRequestError.reason:
        field, _, rest = message.partition(": ")
        return InvalidRequestError(rest or message, field=field if rest else "request")
    error = DiptychError(message, retry_after_s=retry_after_s)
    error.code, error.reason = code, reason or code.name  # type: ignore[misc]
    return error


def from_failure(failure: common_pb2.Failure) -> DiptychError:
    """Inverse of :func:`to_failure`."""
    retry_after_s = failure.retry_after_s if failure.HasField("retry_after_s") else None
    code = _CODES.get(failure.code, grpc.StatusCode.UNKNOWN)
    return remote_error(code, failure.reason, failure.message, retry_after_s)


def from_rpc_error(error: grpc.RpcError) -> DiptychError:
    """The domain error that a failed call carries (its ErrorInfo, else its code)."""
    if not isinstance(error, grpc.aio.AioRpcError):
        return DiptychError(str(error))
    reason, retry_after_s = "", None
    trailing: Any = error.trailing_metadata() or ()
    for key, value in trailing:
        if key != "grpc-status-details-bin" or not isinstance(value, bytes):
            continue
        for detail in status_pb2.Status.FromString(value).details:
            info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
            if detail.Unpack(info):
                reason = info.reason
            elif detail.Unpack(retry):
                retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    return remote_error(error.code(), reason, error.details() or "", retry_after_s)


async def last_word(context: Context, message: Message, within_s: float) -> None:
    """Send ``message``, why a stream is about to end, and wait for the peer to cancel it.

    The status that follows says the same, but gRPC loses a status that meets a message of
    the peer's on its way. Nothing may be on its way out. Returns after ``within_s`` at the
    latest; a cancel ends the handler itself before.
    """
    with contextlib.suppress(TimeoutError, grpc.aio.BaseError):
        async with asyncio.timeout(within_s):
            await context.write(message)
            await asyncio.Event().wait()


async def _abort(context: Context, error: Exception, method: str) -> NoReturn:
    if isinstance(error, DiptychError):
        status = to_status(error)
        logger.debug("rpc refused", extra={"method": method, "reason": error.reason})
    else:
        error_id = uuid.uuid4().hex[:12]
        logger.error("rpc failed", exc_info=error, extra={"method": method, "error_id": error_id})
        status = to_status(DiptychError(f"internal error {error_id}", error_id=error_id))
    untyped: Any = context  # the stubs lack abort_with_status
    await untyped.abort_with_status(rpc_status.to_status(status))
    raise AssertionError("abort_with_status always raises")
