"""Requests that are half there, of which few are waited for, or more than they seem to be."""

import asyncio
import time
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import grpc
import pytest

from diptych.errors import InvalidApiKeyError, QueueFullError, SlowClientError
from diptych.rpc.arriving import Arriving
from diptych.rpc.channel import open_channel
from diptych.rpc.server import Metadata, PublicEdge, make_server
from diptych.rpc.status import from_rpc_error
from diptych.timers import Timers
from tests.http2_frames import connected, message_head

SIZE: Final = "/test.Requests/Size"
MOST_SLOW: Final = 4
EDGE = PublicEdge(
    max_connections=8,
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


async def ask(
    channel: grpc.aio.Channel,
    num_bytes: int,
    whose: str = "",
    compression: grpc.Compression | None = None,
) -> bytes:
    metadata = (("whose", whose),) if whose else ()
    call = channel.unary_unary(SIZE, request_serializer=None, response_deserializer=None)
    answer: bytes = await call(
        b"x" * num_bytes, metadata=metadata, timeout=1, compression=compression
    )
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
    async with (
        serving() as port,
        open_channel(f"127.0.0.1:{port}") as channel,
        connected(port) as raw,
    ):
        for stream_id in range(1, 2 * num_calls, 2):
            raw.begin(stream_id, SIZE)
            raw.send(stream_id, message_head(half) + b"x" * 1000)
        asked = [await ask(channel, 200) for _ in range(5)]
        assert await raw.num_ended(4 * EDGE.slow_after_s) == num_calls - MOST_SLOW // 2
        asked += [await ask(channel, 60_000) for _ in range(5)]
        assert asked == 5 * [b"200"] + 5 * [b"60000"]
        assert await raw.num_ended(EDGE.body_patience_s) == MOST_SLOW // 2


async def test_what_a_message_would_inflate_to_never_is_in_memory() -> None:
    """gRPC stops as it inflates, from the version on that we ask for."""
    num_bytes = 48 * EDGE.max_receive_bytes
    packer = zlib.compressobj(9, wbits=31)
    packed = b"".join(packer.compress(bytes(2**20)) for _ in range(num_bytes // 2**20))
    packed += packer.flush()
    async with serving() as port, connected(port) as raw:
        before = most_bytes(from_now=True)
        raw.begin(1, SIZE, {"grpc-encoding": "gzip"})
        raw.send(1, message_head(len(packed), is_compressed=True) + packed)
        assert await raw.num_ended(EDGE.body_patience_s, 1) == 1
        assert most_bytes() - before < num_bytes / 3
        async with open_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as told:
                await ask(channel, 2 * EDGE.max_receive_bytes, compression=grpc.Compression.Gzip)
            assert told.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await ask(channel, 9999, compression=grpc.Compression.Gzip) == b"9999"


def most_bytes(*, from_now: bool = False) -> int:
    """Of this process in memory at once; ``from_now``: what was before is forgotten."""
    if from_now:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


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


async def test_a_slow_request_has_its_place_until_it_is_there() -> None:
    come = asyncio.Event()

    async def requests() -> AsyncIterator[bytes]:
        await come.wait()
        yield b"request"

    arriving = Arriving(60.0, 1, slow_after_s=0.0)
    for sender in ("me", "you"):
        come.clear()
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(arriving.next(requests(), sender))
            while not arriving._slow.num_held:
                await asyncio.sleep(0)
            with pytest.raises(QueueFullError, match="1 requests are slow"):
                await arriving.next(never(), "another")
            come.set()
        assert waiting.result() == b"request"
        assert arriving._slow.num_held == 0


async def test_a_request_that_comes_as_it_is_found_slow_takes_no_place() -> None:
    async def requests() -> AsyncIterator[bytes]:
        for _ in range(2):
            await asyncio.sleep(0)
        yield b"request"

    arriving = Arriving(60.0, 1, slow_after_s=0.0)
    assert await arriving.next(requests(), "me") == b"request"
    for _ in range(20):
        await asyncio.sleep(0)
    assert arriving._slow.num_held == 0


async def never() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


async def whose(method: str, metadata: Metadata) -> str:
    for name, value in metadata:
        if name == "whose":
            return str(value)
    raise InvalidApiKeyError("nobody's")


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
