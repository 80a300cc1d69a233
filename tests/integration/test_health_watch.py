"""Who watches health and does not read holds up nobody; who asks of nothing is told so."""

import asyncio
import logging
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from diptych.process import ProcessConfig
from diptych.rpc.channel import open_channel
from diptych.service_host import ServiceHost

SERVICE = "diptych.v1.Inference"
DATA, HEADERS, SETTINGS, PING = 0, 1, 4, 6  # of HTTP/2
END_STREAM, END_HEADERS, ACK = 1, 4, 1
INITIAL_WINDOW_SIZE = 4


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def header(name: str, value: str) -> bytes:
    """Neither indexed nor compressed."""
    return b"\0" + b"".join(bytes([len(text)]) + text.encode() for text in (name, value))


@asynccontextmanager
async def deaf_watch(port: int) -> AsyncIterator[None]:
    """A watch of ``SERVICE`` whose window is closed, over a connection that is alive."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    message = health_pb2.HealthCheckRequest(service=SERVICE).SerializeToString()
    asked = {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/grpc.health.v1.Health/Watch",
        ":authority": "test",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    writer.write(
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, 0))
        + frame(HEADERS, END_HEADERS, 1, b"".join(header(*each) for each in asked.items()))
        + frame(DATA, END_STREAM, 1, struct.pack(">BI", 0, len(message)) + message)
    )
    is_accepted = asyncio.Event()

    async def answer() -> None:
        while True:
            length, kind, flags, stream = struct.unpack(
                ">IBBI", b"\0" + await reader.readexactly(9)
            )
            payload = await reader.readexactly(length)
            assert kind != DATA, "it cannot have been sent"
            if kind in (SETTINGS, PING) and not flags & ACK:
                writer.write(frame(kind, ACK, stream, payload if kind == PING else b""))
            elif kind == HEADERS:
                is_accepted.set()

    async with asyncio.TaskGroup() as tasks:
        answering = tasks.create_task(answer())
        await is_accepted.wait()
        yield
        answering.cancel()
    writer.close()


async def test_a_watcher_that_never_reads_holds_up_nobody() -> None:
    known = health_pb2.HealthCheckResponse
    async with ServiceHost(ProcessConfig(listen="127.0.0.1:0")) as host:
        await host.start([SERVICE])
        async with deaf_watch(host.port), open_channel(host.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=60)
            heard = [(await watch.read()).status]
            for serving in (True, False):
                async with asyncio.timeout(20):
                    host.set_serving(serving)
                    heard.append((await watch.read()).status)
            watch.cancel()
    assert heard == [known.NOT_SERVING, known.SERVING, known.NOT_SERVING]


async def test_a_service_may_be_watched_before_it_is_known() -> None:
    known = health_pb2.HealthCheckResponse
    async with ServiceHost(ProcessConfig(listen="127.0.0.1:0")) as host:
        await host.start([SERVICE])
        async with open_channel(host.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            watch = stub.Watch(health_pb2.HealthCheckRequest(service="other"), timeout=60)
            assert (await watch.read()).status == known.SERVICE_UNKNOWN
            watch.cancel()


async def test_who_asks_of_no_service_hears_so_and_the_log_says_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    async with ServiceHost(ProcessConfig(listen="127.0.0.1:0")) as host:
        await host.start([SERVICE])
        async with open_channel(host.address) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await check(health_pb2.HealthCheckRequest(service="other"), timeout=20)
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    assert not caplog.records
