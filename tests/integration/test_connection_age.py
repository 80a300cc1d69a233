"""Connections come of age while calls begin on them, or go on for longer: no request is lost."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import grpc
import pytest

from diptych.client import DiptychClient, SamplingOptions
from diptych.rpc.channel import MAX_MESSAGE_BYTES, open_channel
from diptych.rpc.server import make_server
from tests.integration.router_rig import PATIENT, PROMPT, expected, running
from tests.waiting import until, within

AGE_S = 0.3
LONG_S = 2.0
NUM_TOKENS = 40
SOON_S = 60.0
LARGE_BYTES: Final = 300_000  # more than gRPC keeps of a call, to make it again, by itself
MOST_BYTES: Final = MAX_MESSAGE_BYTES

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEAD_BYTES: Final = 9  # of a frame: length, type, flags, stream
_HEADERS, _SETTINGS, _GOAWAY = 1, 4, 7


def frame(kind: int, payload: bytes = b"") -> bytes:
    """One of HTTP/2 that is about the connection."""
    return len(payload).to_bytes(3, "big") + bytes([kind, 0]) + bytes(4) + payload


def came_of_age() -> bytes:
    """The last word to a client: none of its streams was looked at."""
    return frame(_GOAWAY, bytes(4) + bytes(4) + b"max_age")


async def turn_away(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until a call begins, and not for it."""
    assert await reader.readexactly(len(_PREFACE)) == _PREFACE
    writer.write(frame(_SETTINGS))
    while True:
        head = await reader.readexactly(_HEAD_BYTES)
        await reader.readexactly(int.from_bytes(head[:3], "big"))
        if head[3] == _HEADERS:
            break
    writer.write(came_of_age())
    await writer.drain()
    with suppress(ConnectionError):
        await reader.read()  # the client ends it


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


@asynccontextmanager
async def coming_of_age(port: int) -> AsyncIterator[tuple[str, list[str]]]:
    """Where the first connection is over as a call begins on it; later ones lead to ``port``.

    And what became of each.
    """
    fates: list[str] = []
    is_open: list[asyncio.StreamWriter] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_open.append(writer)
        fates.append("passed on" if fates else "turned away")
        if len(fates) == 1:
            await turn_away(reader, writer)
            writer.close()
        else:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
            async with asyncio.TaskGroup() as ways:
                ways.create_task(pass_on(reader, far_writer), name="there")
                ways.create_task(pass_on(far_reader, writer), name="back")
        is_open.remove(writer)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", fates
    finally:
        server.close()
        for writer in is_open:
            writer.transport.abort()
        await until(lambda: not is_open, SOON_S, "connections end")


class Echo(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Whatever is asked: how many bytes came."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        async def answer(request: bytes, _: object) -> bytes:
            return str(len(request)).encode()

        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.mark.parametrize("num_bytes", [1, LARGE_BYTES, MOST_BYTES], ids=["small", "large", "most"])
async def test_a_call_that_no_server_looked_at_is_made_again_by_its_channel(
    num_bytes: int,
) -> None:
    """However large its request is."""
    server = make_server()
    server.add_generic_rpc_handlers((Echo(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with (
            coming_of_age(port) as (address, fates),
            open_channel(address) as channel,
            within(SOON_S),
        ):
            untyped: Any = channel  # the stubs want serializers
            call = untyped.unary_unary("/any/Call")
            assert await call(b"x" * num_bytes) == b"%d" % num_bytes
    finally:
        await server.stop(0)
    assert fates == ["turned away", "passed on"]


async def test_answers_that_outlive_their_connection_and_its_grace_are_whole(
    wide_model: Path,
) -> None:
    """Whose clients go on where they were cut; short ones come all the while."""
    ages: dict[str, Any] = {"max_connection_age_s": AGE_S, "max_connection_grace_s": AGE_S}
    async with running(wide_model, 1, 1, timers=PATIENT, **ages) as cluster:
        cluster.decode[0].behaviour.step_s = LONG_S / NUM_TOKENS
        async with DiptychClient(cluster.address) as client, within(SOON_S):
            is_over = False

            async def ask_short() -> None:
                while not is_over:
                    await answer(client, 2)

            async with asyncio.TaskGroup() as tasks:
                for _ in range(4):
                    tasks.create_task(ask_short(), name="short")
                async with asyncio.TaskGroup() as long:
                    resumed = [
                        long.create_task(answer(client, NUM_TOKENS), name="long") for _ in range(4)
                    ]
                is_over = True
    assert all(task.result() > 0 for task in resumed), "none was cut"


async def answer(client: DiptychClient, num_tokens: int) -> int:
    """Of how many tokens its last call was told that they were there."""
    options = SamplingOptions(max_tokens=num_tokens, ignore_eos=True)
    chunks = [each async for each in client.generate(token_ids=PROMPT, options=options)]
    assert [token for each in chunks for token in each.token_ids] == expected(num_tokens)
    usage = chunks[-1].usage
    assert usage is not None
    return usage.num_resumed_tokens
