"""gRPC servers whose handlers may raise any DiptychError."""

import asyncio
import inspect
import logging
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import grpc
from google.protobuf.message import Message
from grpc_status import rpc_status

from diptych.errors import RETRY_LATER_S, DiptychError, InvalidRequestError, QueueFullError
from diptych.rpc.arriving import SLOW_AFTER_S, Arriving
from diptych.rpc.channel import MAX_MESSAGE_BYTES, SIZE_OPTIONS, ChannelOptions, keepalive_options
from diptych.rpc.decoding import decode
from diptych.rpc.identity import Certificate, Identity
from diptych.rpc.open_calls import OpenCalls
from diptych.rpc.status import to_status
from diptych.timers import Timers

logger = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_TIMERS = Timers()
_STANDARD: Final = "/grpc."  # health and reflection
MAX_CALLS_RATIO: Final = 8  # all, with those whose clients take no answer, to those answered

Metadata: TypeAlias = Sequence[tuple[str, str | bytes]]

Gate: TypeAlias = Callable[[str, Metadata], Awaitable[str]]
"""Gets a call's method, /package.Service/Method, and metadata, and says whose it is.

Raises DiptychError to refuse it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicEdge:
    """What a server allows that anybody may connect to. Times in seconds.

    A peer of the cluster answers pings within two seconds or is lost; a client may
    pause for longer, and a gateway before it need not bear many pings. A connection
    ends after ``max_connection_age_s`` (its calls go on for ``max_connection_grace_s``),
    so that clients spread over routers that came later. One beyond ``max_connections`` is
    closed as it comes. ``max_concurrent_streams`` calls
    at most go over one connection, more wait at their client; a message of more than
    ``max_receive_bytes`` ends its call before it is in memory; one that is not there
    ``body_patience_s`` after its call began ends it, too. Only ``max_slow`` may take longer than
    ``slow_after_s``, of requests and of health and reflection each, and of whoever sends them as
    many as it leaves free: whose the gate says that they are, or an address.

    ``max_served`` calls are answered at a time. One whose answer is there, but whose client
    takes nothing of it, is no longer among them: gRPC can neither end it nor tell its client
    anything, so such ones are bounded by ``max_concurrent_rpcs`` alone. Each method of health
    and of reflection has as many places of its own, for watches may last and say nothing. A
    reflection stream whose next question is not there after ``body_patience_s`` is ended.
    """

    max_connections: int
    max_served: int
    max_concurrent_rpcs: int
    max_concurrent_streams: int
    max_receive_bytes: int
    max_slow: int
    max_connection_age_s: float
    max_connection_grace_s: float
    body_patience_s: float
    slow_after_s: float = SLOW_AFTER_S
    keepalive_s: float = 30.0
    keepalive_answer_s: float = 20.0
    certificate: Certificate | None = None  # clients speak TLS
    gate: Gate | None = None  # who is let in at all
    shares_port: bool = False  # with other processes that say so too


def make_server(
    timers: Timers = _TIMERS,
    public: PublicEdge | None = None,
    identity: Identity | None = None,
    calls: OpenCalls | None = None,
) -> grpc.aio.Server:
    """Make a server whose handlers may raise DiptychError. The caller starts it.

    ``public``: for clients; None: for the cluster's own processes, judged by ``timers``. With an
    ``identity``, the certificate of who calls decides which services are for them. ``calls``: who
    may end those that are open.
    """
    options = [
        *(_cluster_options(timers) if public is None else _public_options(public)),
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", int(public is not None and public.shares_port)),
    ]
    return grpc.aio.server(
        interceptors=[ErrorInterceptor(identity, public, calls)],
        options=options,
        maximum_concurrent_rpcs=None if public is None else public.max_concurrent_rpcs,
    )


def _cluster_options(timers: Timers) -> ChannelOptions:
    return [*keepalive_options(timers.keepalive_s, timers.keepalive_answer_s), *SIZE_OPTIONS]


def _public_options(public: PublicEdge) -> ChannelOptions:
    return [
        *keepalive_options(public.keepalive_s, public.keepalive_answer_s),
        ("grpc.max_allowed_incoming_connections", public.max_connections),
        ("grpc.max_connection_age_ms", int(1000 * public.max_connection_age_s)),
        ("grpc.max_connection_age_grace_ms", int(1000 * public.max_connection_grace_s)),
        ("grpc.max_concurrent_streams", public.max_concurrent_streams),
        ("grpc.max_receive_message_length", public.max_receive_bytes),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ]


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Translate a DiptychError raised by any handler; anything else is INTERNAL with an id.

    A request that is not valid protobuf becomes REQUEST_INVALID, naming the
    field if the reason is a string that is not UTF-8.
    """

    def __init__(
        self,
        identity: Identity | None = None,
        public: PublicEdge | None = None,
        calls: OpenCalls | None = None,
    ) -> None:
        """With an ``identity``, a caller whose role may not call is refused first of all.

        The gate of a ``public`` edge is asked before anything of the request is taken. Calls of
        health and of reflection are none of ``calls``.
        """
        self._calls = OpenCalls() if calls is None else calls
        self._identity = identity
        self._gate = None if public is None else public.gate
        self._max_served = None if public is None else public.max_served
        self._num_served: Counter[str] = Counter()
        self._arriving = None if public is None else _arriving(public)
        self._arriving_standard = None if public is None else _arriving(public)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method, whose = handler_call_details.method, ""
        if self._gate is not None:
            try:
                metadata = tuple(handler_call_details.invocation_metadata or ())
                whose = await self._gate(method, metadata)
            except DiptychError as error:
                return _refusal(error, method)
        handler = await continuation(handler_call_details)
        if handler is None:  # unknown method: gRPC answers UNIMPLEMENTED
            return None
        codec = (_tolerant(handler.request_deserializer), handler.response_serializer)
        # gRPC itself waits for a single request without an end; of a stream one is asked for.
        place, asks_again, arriving = "", False, self._arriving
        answering: Callable[[Context], AbstractContextManager[None]] = self._calls.answering
        if method.startswith(_STANDARD):
            place, asks_again = method, handler.request_streaming
            arriving = self._arriving_standard
            answering = _uncounted
        if handler.request_streaming and not asks_again:  # its handler reads it
            arriving = None
        takes_stream = handler.request_streaming or arriving is not None
        if handler.response_streaming:
            inner_stream = handler.stream_stream or handler.unary_stream

            async def stream(request: Any, context: Context) -> AsyncIterator[Message]:
                try:
                    with answering(context), self._place(place):
                        self._check(method, context)
                        sender = whose or _host(context)
                        if asks_again:
                            request = _each_received(request, arriving, sender)
                        else:
                            request = await _received(request, arriving, sender)
                        responses = inner_stream(request, context)
                        if inspect.isawaitable(responses):  # it writes them to the context itself
                            await responses
                            return
                        async for response in responses:
                            yield response
                except (asyncio.CancelledError, grpc.RpcError, grpc.aio.AbortError, GeneratorExit):
                    raise
                except Exception as error:  # noqa: BLE001 - the boundary of the process
                    await _abort(context, error, method)

            if takes_stream:
                return grpc.stream_stream_rpc_method_handler(stream, *codec)
            return grpc.unary_stream_rpc_method_handler(stream, *codec)

        inner_unary = handler.stream_unary or handler.unary_unary

        async def unary(request: Any, context: Context) -> Message | None:
            try:
                with answering(context), self._place(place):
                    self._check(method, context)
                    request = await _received(request, arriving, whose or _host(context))
                    response: Message = await inner_unary(request, context)
            except (asyncio.CancelledError, grpc.RpcError, grpc.aio.AbortError):
                raise
            except Exception as error:  # noqa: BLE001 - the boundary of the process
                await _abort(context, error, method)
                return None
            return response

        if takes_stream:
            return grpc.stream_unary_rpc_method_handler(unary, *codec)
        return grpc.unary_unary_rpc_method_handler(unary, *codec)

    @contextmanager
    def _place(self, among: str) -> Iterator[None]:
        """Among those that are answered. Raises QueueFullError."""
        num_served = self._num_served[among]
        if self._max_served is not None and num_served >= self._max_served:
            raise QueueFullError(
                f"{num_served} calls are being answered", retry_after_s=RETRY_LATER_S
            )
        self._num_served[among] += 1
        try:
            yield
        finally:
            self._num_served[among] -= 1

    def _check(self, method: str, context: Context) -> None:
        if self._identity is not None:
            self._identity.check_caller(method, context.auth_context())


def _refusal(error: DiptychError, method: str) -> Any:
    """A handler that ends the call at once: of a stream, for those of others wait for a request."""

    async def refuse(requests: object, context: Context) -> None:
        await _abort(context, error, method)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _uncounted(context: Context) -> AbstractContextManager[None]:
    """In the place of ``OpenCalls.answering``."""
    return nullcontext()


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
            return decode(message_type, data)
        except InvalidRequestError as error:
            return _Undecodable(error)

    return deserialize


def _arriving(public: PublicEdge) -> Arriving:
    return Arriving(public.body_patience_s, public.max_slow, public.slow_after_s)


def _host(context: Context) -> str:
    """Where a call comes from, without its port."""
    return str(context.peer()).rpartition(":")[0]


async def _received(request: Any, arriving: Arriving | None, sender: str) -> Any:
    """What the handler gets; ``arriving``: the first of ``request``, which is a stream.

    Raises InvalidRequestError, SlowClientError, QueueFullError.
    """
    if arriving is not None:
        try:
            request = await arriving.next(aiter(request), sender)
        except StopAsyncIteration:
            raise InvalidRequestError("did not come", field="request") from None
    check_decoded(request)
    return request


async def _each_received(
    requests: Any, arriving: Arriving | None, sender: str
) -> AsyncIterator[Any]:
    """All of a stream. Raises InvalidRequestError, SlowClientError, QueueFullError."""
    remaining = aiter(requests)
    while True:
        try:
            if arriving is None:
                request = await anext(remaining)
            else:
                request = await arriving.next(remaining, sender)
        except StopAsyncIteration:
            return
        check_decoded(request)
        yield request


def check_decoded(request: object) -> None:
    """Refuse what did not parse: for handlers that read a stream themselves.

    Raises InvalidRequestError.
    """
    if isinstance(request, _Undecodable):
        raise request.error


async def _abort(context: Context, error: Exception, method: str) -> None:
    """End the call with the error; its handler returns then, with whatever it likes.

    gRPC keeps its AbortError with the call and raises it once the handler has returned. With our
    frames, which have the call, the two would wait for the collector, with all that these have.
    """
    if isinstance(error, DiptychError):
        status = to_status(error)
        logger.debug("rpc refused", extra={"method": method, "reason": error.reason})
    else:
        error_id = uuid.uuid4().hex[:12]
        logger.error("rpc failed", exc_info=error, extra={"method": method, "error_id": error_id})
        status = to_status(DiptychError(f"internal error {error_id}", error_id=error_id))
    untyped: Any = context  # the stubs lack abort_with_status
    try:
        await untyped.abort_with_status(rpc_status.to_status(status))
    except grpc.aio.AbortError as aborted:
        aborted.__traceback__ = aborted.__context__ = None
    except grpc.aio.BaseError:  # who did not take an answer is gone before it took this
        raise asyncio.CancelledError from None
