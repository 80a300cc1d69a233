"""Requests that are half there: few are waited for at a time, and nobody waits behind them."""

import asyncio
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final

import grpc
import pytest

from diptych.errors import InvalidApiKeyError, QueueFullError, SlowClientError
from diptych.rpc.arriving import Arriving
from diptych.rpc.channel import open_channel
from diptych.rpc.server import Metadata, PublicEdge, make_server
from diptych.rpc.status import from_rpc_error
from diptych.timers import Timers

SIZE: Final = "/test.Requests/Size"
MOST_SLOW: Final = 4
EDGE = PublicEdge(
    max_served=40,
    max_concurrent_rpcs=80,
    max_concurrent_streams=40,
    max_receive_bytes=2**20,
    max_slow=MOST_SLOW,
    max_connection_age_s=1000,
    max_connection_grace_s=1000,
    body_patience_s=3.0,
    slow_after_s=0.3,
)


async def size(request: bytes, context: object) -> bytes:
    return str(len(request)).encode()


@asynccontextmanager
async def serving(edge: PublicEdge = EDGE) -> AsyncIterator[int]:
    server = make_server(Timers(), edge)
    handlers = {"Size": grpc.unary_unary_rpc_method_handler(size)}
    handler = grpc.method_handlers_generic_handler("test.Requests", handlers)
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield port
    await server.stop(None)


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return (
        struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream_id) + payload
    )


def head(stream_id: int) -> bytes:
    """The headers of a call, in HPACK without its tables."""
    fields = {":method": "POST", ":scheme": "http", ":path": SIZE, ":authority": "a"}
    fields |= {"te": "trailers", "content-type": "application/grpc"}
    block = b""
    for name, value in fields.items():
        block += b"\0" + b"".join(bytes([len(each)]) + each.encode() for each in (name, value))
    return frame(1, 0x4, stream_id, block)


async def frames(reader: asyncio.StreamReader) -> AsyncIterator[tuple[int, int, int]]:
    """Of what a server sends: kind, flags and stream."""
    while True:
        header = await reader.readexactly(9)
        length, kind, flags, stream_id = struct.unpack(">IBBI", b"\0" + header)
        await reader.readexactly(length)
        yield kind, flags, stream_id


async def num_ended(reader: asyncio.StreamReader, within_s: float) -> int:
    """Of calls, by what the server says of them."""
    ended = set()
    try:
        async with asyncio.timeout(within_s):
            async for kind, flags, stream_id in frames(reader):
                if kind == 3 or (kind in (0, 1) and flags & 1):
                    ended.add(stream_id)
    except TimeoutError:
        pass
    return len(ended)


async def ask(channel: grpc.aio.Channel, num_bytes: int, whose: str = "") -> bytes:
    metadata = (("whose", whose),) if whose else ()
    call = channel.unary_unary(SIZE, request_serializer=None, response_deserializer=None)
    answer: bytes = await call(b"x" * num_bytes, metadata=metadata, timeout=1)
    return answer


async def end_of_silent(channel: grpc.aio.Channel, whose: str) -> type[Exception]:
    """Of a call whose request never comes."""
    call = channel.stream_stream(SIZE, request_serializer=None, response_deserializer=None)(
        None, metadata=(("whose", whose),)
    )
    try:
        await call.read()
        raise AssertionError("it was answered")
    except grpc.aio.AioRpcError as error:
        return type(from_rpc_error(error))


async def test_of_half_sent_requests_few_are_kept_and_whole_ones_do_not_wait() -> None:
    """The greater part of each is in the server's memory; half of the places are one sender's."""
    num_calls, half = 20, 2**19
    async with serving() as port, open_channel(f"127.0.0.1:{port}") as channel:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0))
        for stream_id in range(1, 2 * num_calls, 2):
            announced = struct.pack(">BI", 0, half)
            writer.write(head(stream_id) + frame(0, 0, stream_id, announced + b"x" * 1000))
        asked = [await ask(channel, 200) for _ in range(5)]
        assert await num_ended(reader, 4 * EDGE.slow_after_s) == num_calls - MOST_SLOW // 2
        asked += [await ask(channel, 60_000) for _ in range(5)]
        assert asked == 5 * [b"200"] + 5 * [b"60000"]
        assert await num_ended(reader, EDGE.body_patience_s) == MOST_SLOW // 2
        writer.close()
        await writer.wait_closed()


async def never() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


async def whose(method: str, metadata: Metadata) -> str:
    for name, value in metadata:
        if name == "whose":
            return str(value)
    raise InvalidApiKeyError("nobody's")


async def test_a_request_that_came_while_the_loop_was_busy_is_not_slow() -> None:
    """The loop hears of the time before it hears of what came in that time."""

    async def requests() -> AsyncIterator[bytes]:
        time.sleep(0.1)  # noqa: ASYNC251 - on the event loop, which is what is tested
        await asyncio.sleep(0)
        yield b"request"

    arriving = Arriving(1.0, 0, slow_after_s=0.01)
    assert await arriving.next(requests(), "me") == b"request"
    with pytest.raises(QueueFullError):
        await arriving.next(never(), "me")


async def test_slow_requests_of_one_tenant_leave_others_places() -> None:
    async with (
        serving(replace(EDGE, gate=whose)) as port,
        open_channel(f"127.0.0.1:{port}") as channel,
        asyncio.TaskGroup() as tasks,
    ):
        silent = [tasks.create_task(end_of_silent(channel, "mallory")) for _ in range(20)]
        await asyncio.sleep(2 * EDGE.slow_after_s)
        others = tasks.create_task(end_of_silent(channel, "bob"))
        assert await ask(channel, 200, "bob") == b"200"
    ends = [each.result() for each in silent]
    assert ends.count(QueueFullError) == len(ends) - MOST_SLOW // 2
    assert ends.count(SlowClientError) == MOST_SLOW // 2
    assert others.result() is SlowClientError
