"""What clients may do to a server that anybody may connect to."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from diptych.errors import DiptychError, InvalidRequestError, QueueFullError, SlowClientError
from diptych.rpc.call_end import CallEnd
from diptych.rpc.channel import open_channel
from diptych.rpc.server import PublicEdge, make_server
from diptych.rpc.status import from_rpc_error
from diptych.timers import Timers
from tests.call_ends import told

SERVES = health_pb2.HealthCheckResponse.SERVING
EDGE = PublicEdge(
    max_connections=8,
    max_served=2,
    max_concurrent_rpcs=20,
    max_concurrent_streams=10,
    max_receive_bytes=100,
    max_slow=10,
    max_connection_age_s=1000,
    max_connection_grace_s=1000,
    body_patience_s=1.0,
)
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
REQUEST = "/test.Requests/Last"


async def last(request: object, context: object) -> AsyncIterator[bytes]:
    """Begin to answer, and go on for as long as the client is there."""
    yield b"answer"
    await asyncio.Event().wait()


@pytest_asyncio.fixture
async def port() -> AsyncIterator[int]:
    """Of a server of requests that last, of health and of reflection; two calls at a time."""
    server = make_server(Timers(), EDGE)
    requests = {"Last": grpc.unary_stream_rpc_method_handler(last)}
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test.Requests", requests),)
    )
    reflection.enable_server_reflection([], server)
    servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    await servicer.set("", SERVES)
    opened = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield opened
    await server.stop(None)


@pytest_asyncio.fixture
async def channel(port: int) -> AsyncIterator[grpc.aio.Channel]:
    """To that server."""
    async with open_channel(f"127.0.0.1:{port}") as opened:
        yield opened


async def end_of(channel: grpc.aio.Channel, method: str, *sent: bytes) -> DiptychError:
    """Of a call whose client sends these; an empty one says that there is nothing more."""
    call = channel.stream_stream(method, request_serializer=None, response_deserializer=None)(None)
    try:
        async with told(CallEnd(call)):
            for piece in sent:
                await (call.write(piece) if piece else call.done_writing())
            async for _ in call:
                pass
        raise AssertionError("it ended well")
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)


async def served(channel: grpc.aio.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    assert (await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)).status == SERVES
    async for answer in stub.Watch(health_pb2.HealthCheckRequest(), timeout=10):
        assert answer.status == SERVES
        break


@pytest.mark.parametrize("method", [CHECK, WATCH])
async def test_calls_whose_request_never_comes_take_no_place_for_long(
    channel: grpc.aio.Channel, method: str
) -> None:
    async with asyncio.TaskGroup() as tasks:  # all the places that there are
        silent = range(EDGE.max_served)
        ends = [tasks.create_task(end_of(channel, method)) for _ in silent]
    for error in (end.result() for end in ends):
        assert isinstance(error, SlowClientError)
        assert "within 1 s" in error.message
    await served(channel)


@pytest.mark.parametrize("method", [CHECK, WATCH])
async def test_a_call_without_a_request_or_with_a_wrong_one_is_refused(
    channel: grpc.aio.Channel, method: str
) -> None:
    for sent in (b"", b"\xff\xff"):
        assert isinstance(await end_of(channel, method, sent), InvalidRequestError)
    await served(channel)


class Failing(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Whose errors nobody foresaw; they quote what they should not."""

    async def Check(self, request: object, context: object) -> health_pb2.HealthCheckResponse:
        raise RuntimeError("of a secret")

    async def Watch(
        self, request: object, context: object
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        raise RuntimeError("of a secret")
        yield


@pytest.mark.parametrize("method", [CHECK, WATCH])
async def test_of_an_error_that_nobody_foresaw_clients_hear_an_id_and_the_log_all(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = make_server(Timers(), EDGE)
    health_pb2_grpc.add_HealthServicer_to_server(Failing(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_stream(method, request_serializer=None, response_deserializer=None)(
            None
        )
        await call.write(b"")
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.INTERNAL
        told = f"{await call.details()} {await call.trailing_metadata()!r}"
    await server.stop(None)
    (record,) = [record for record in caplog.records if record.message == "rpc failed"]
    assert "of a secret" in caplog.text
    assert told.startswith(f"internal error {record.__dict__['error_id']} ")
    assert "secret" not in told


def question() -> bytes:
    """What reflection is asked."""
    asked: bytes = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()
    return asked


@asynccontextmanager
async def all_places(
    channel: grpc.aio.Channel, method: str, question: bytes
) -> AsyncIterator[None]:
    """Calls of one method take all that it has, and last."""
    opened = channel.stream_stream(method, request_serializer=None, response_deserializer=None)
    calls = [opened(None) for _ in range(EDGE.max_served)]
    for call in calls:
        await call.write(question)
        assert isinstance(await call.read(), bytes)
    yield
    for call in calls:
        call.cancel()


async def test_no_more_requests_are_answered_at_a_time(channel: grpc.aio.Channel) -> None:
    async with all_places(channel, REQUEST, b""):
        assert isinstance(await end_of(channel, REQUEST, b""), QueueFullError)
        await served(channel)


@pytest.mark.parametrize(("method", "asked"), [(WATCH, b""), (REFLECTION, question())])
async def test_watches_and_reflection_take_no_place_of_others(
    channel: grpc.aio.Channel, method: str, asked: bytes
) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    async with all_places(channel, method, asked):
        assert isinstance(await end_of(channel, method, asked), QueueFullError)
        assert (await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)).status == SERVES
        async with all_places(channel, REQUEST, b""):
            pass


async def test_connections_beyond_the_bound_are_closed_as_they_come(
    port: int, channel: grpc.aio.Channel
) -> None:
    """They take no file of the process, which needs some to find its workers again."""
    await served(channel)
    async with AsyncExitStack() as others:
        for number in range(1, EDGE.max_connections + 3):
            is_let_in = await others.enter_async_context(connection(port))
            assert is_let_in == (number < EDGE.max_connections)
        await served(channel)
    async with open_channel(f"127.0.0.1:{port}") as later:
        check = health_pb2_grpc.HealthStub(later).Check  # once gRPC has heard that they left
        await check(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=30)


@asynccontextmanager
async def connection(port: int) -> AsyncIterator[bool]:
    """One on which nothing is asked; whether it was let in, so that the server says something."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield await reader.read(1) != b""
    finally:
        writer.close()


async def test_a_reflection_stream_that_asks_no_more_is_ended(channel: grpc.aio.Channel) -> None:
    for questions in ((), (question(),)):
        error = await end_of(channel, REFLECTION, *questions)
        assert isinstance(error, SlowClientError)
    assert isinstance(await end_of(channel, REFLECTION, b"\xff\xff"), InvalidRequestError)


async def test_calls_whose_answers_are_not_taken_keep_nobody_out(
    port: int, channel: grpc.aio.Channel
) -> None:
    """Their client's window is smaller than an answer, and it reads nothing."""
    options = (
        ("grpc.http2.lookahead_bytes", 5),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.use_local_subchannel_pool", 1),
    )
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as slow:
        method = slow.stream_stream(CHECK, request_serializer=None, response_deserializer=None)
        calls = []
        for _ in range(2 * EDGE.max_served):  # one by one: who has no answer yet has a place
            call = method(None)
            await call.write(b"")
            await call.initial_metadata()  # which goes with the answer
            calls.append(call)
        await served(channel)
        assert not any(call.done() for call in calls)
        assert (
            await calls[0].read()
            == health_pb2.HealthCheckResponse(status=SERVES).SerializeToString()
        )
