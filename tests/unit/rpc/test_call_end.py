"""A call that ends while we write is over for the reason that its peer gave."""

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
import pytest_asyncio

from diptych.errors import PeerNotAllowedError
from diptych.rpc import call_end
from diptych.rpc.call_end import CallEnd
from diptych.rpc.channel import open_channel
from diptych.rpc.client_stream import ClientStream
from diptych.rpc.server import make_server
from diptych.timers import Timers

METHOD = "/diptych.v1.KVSource/Fetch"
NOTHING = grpc.aio.Metadata()
OWN = grpc.aio.AioRpcError(
    grpc.StatusCode.INTERNAL, NOTHING, NOTHING, "Internal error from Core", "execute_batch"
)
REFUSED = grpc.aio.AioRpcError(grpc.StatusCode.PERMISSION_DENIED, NOTHING, NOTHING, "no", None)


class Refuses(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Ends each call before it has looked at a message."""

    def service(self, details: object) -> Any:
        async def refuse(requests: object, context: object) -> AsyncIterator[bytes]:
            raise PeerNotAllowedError("not for you")
            yield b""

        return grpc.stream_stream_rpc_method_handler(refuse)


@pytest_asyncio.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    server = make_server(Timers())
    server.add_generic_rpc_handlers((Refuses(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as opened:
        yield opened
    await server.stop(None)


def open_call(channel: grpc.aio.Channel, requests: AsyncIterator[bytes] | None) -> Any:
    stub = channel.stream_stream(METHOD, request_serializer=None, response_deserializer=None)
    return stub(requests)


async def test_a_peer_that_refuses_while_we_write_is_understood(channel: grpc.aio.Channel) -> None:
    async def requests() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield bytes(1000)

    for _ in range(50):
        stream = ClientStream(open_call(channel, requests()), Timers(), progress=lambda event: None)
        error = await stream.run(lambda event: None)
        assert isinstance(error, PeerNotAllowedError), error
        assert error.message == "not for you"


class FakeCall:
    """Is told how it ended, as often as a test says."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[Any], None]] = []
        self.ended = OWN

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.callbacks.append(callback)

    def end(self, how: grpc.aio.AioRpcError) -> None:
        self.ended = how
        for callback in self.callbacks:
            callback(self)

    async def code(self) -> grpc.StatusCode:
        return self.ended.code()

    async def details(self) -> str | None:
        return self.ended.details()

    async def initial_metadata(self) -> grpc.aio.Metadata:
        return NOTHING

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        return NOTHING


async def test_what_the_peer_said_is_what_counts_whenever_it_comes() -> None:
    before, after = FakeCall(), FakeCall()
    end_before, end_after = CallEnd(before), CallEnd(after)
    before.end(REFUSED)
    before.end(OWN)
    after.end(OWN)
    async with asyncio.TaskGroup() as tasks:
        later = tasks.create_task(end_after.error(OWN))
        await asyncio.sleep(0)
        assert not later.done()
        after.end(REFUSED)
    for said in (await end_before.error(OWN), later.result()):
        assert said is not None
        assert (said.code(), said.details()) == (grpc.StatusCode.PERMISSION_DENIED, "no")


async def test_an_end_without_an_error_stays_one() -> None:
    call = FakeCall()
    end = CallEnd(call)
    call.end(grpc.aio.AioRpcError(grpc.StatusCode.OK, NOTHING, NOTHING, "", None))
    call.end(OWN)
    assert await end.error(OWN) is None


async def test_where_the_peer_says_nothing_the_library_is_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(call_end, "_STATUS_PATIENCE_S", 0.001)
    assert await CallEnd(FakeCall()).error(OWN) is OWN
    assert await CallEnd(FakeCall()).error(REFUSED) is REFUSED


@pytest.mark.parametrize(
    ("code", "details"),
    [
        (grpc.StatusCode.INTERNAL, "an id in the log"),
        (grpc.StatusCode.UNKNOWN, OWN.details()),
        (grpc.StatusCode.INTERNAL, None),
    ],
)
async def test_what_only_looks_like_the_librarys_word_is_the_peers(
    code: grpc.StatusCode, details: str | None
) -> None:
    said = grpc.aio.AioRpcError(code, NOTHING, NOTHING, details, None)
    call = FakeCall()
    end = CallEnd(call)
    assert await end.error(said) is said
    call.end(said)
    call.end(OWN)
    told = await end.error(OWN)
    assert told is not None
    assert (told.code(), told.details()) == (code, details)


@pytest.mark.usefixtures("no_collector")
async def test_a_call_is_not_kept_by_what_waits_for_its_end(channel: grpc.aio.Channel) -> None:
    async def use() -> weakref.ref[Any]:
        call = open_call(channel, None)
        end = CallEnd(call)
        with contextlib.suppress(grpc.aio.AioRpcError):
            await call.read()
        assert (await end.error(OWN)) is not OWN
        return weakref.ref(call)

    call = await use()
    for _ in range(10):
        await asyncio.sleep(0)
    assert call() is None
