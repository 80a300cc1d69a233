"""A peer that comes back under its name at another address, as a pod does, is found at once."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from diptych.rpc.channel import open_channel

_HEADER_BYTES = 12
_TYPE_A = 1
_SOON_S = 10.0  # a third of how long gRPC leaves names alone by itself


class NameServer(asyncio.DatagramProtocol):
    """Answers every question for an IPv4 address with ``address``, and no other question."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str | int, int]) -> None:
        end = data.index(b"\0", _HEADER_BYTES) + 1
        question = data[_HEADER_BYTES : end + 4]
        (kind,) = struct.unpack(">H", data[end : end + 2])
        answers = b""
        if kind == _TYPE_A:  # the name asked for, class IN, for no time at all
            answers = struct.pack(">HHHIH", 0xC00C, kind, 1, 0, 4) + socket.inet_aton(self.address)
        counts = struct.pack(">HHHH", 1, 1 if answers else 0, 0, 0)
        assert self._transport is not None
        self._transport.sendto(data[:2] + b"\x81\x80" + counts + question + answers, addr)


@asynccontextmanager
async def name_server(address: str) -> AsyncIterator[tuple[NameServer, int]]:
    """One on a free port."""
    transport, server = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: NameServer(address), local_addr=("127.0.0.1", 0)
    )
    try:
        yield server, transport.get_extra_info("sockname")[1]
    finally:
        transport.close()


@asynccontextmanager
async def peer(host: str, port: int = 0) -> AsyncIterator[int]:
    """A server that says it is well; its port."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)  # type: ignore[attr-defined]
    bound = server.add_insecure_port(f"{host}:{port}")
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(None)


async def _answered(
    stub: health_pb2_grpc.HealthStub, ask: health_pb2.HealthCheckRequest
) -> health_pb2.HealthCheckResponse:
    """Within time, asked twice if the first went out on the connection that was breaking."""
    async with asyncio.timeout(_SOON_S):
        try:
            return await stub.Check(ask, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
        return await stub.Check(ask, wait_for_ready=True)


async def test_a_peer_that_moved_is_found_by_its_name() -> None:
    ask = health_pb2.HealthCheckRequest()
    async with name_server("127.0.0.1") as (names, name_port):
        async with peer("127.0.0.1") as port:
            channel = open_channel(f"dns://127.0.0.1:{name_port}/worker.test:{port}")
            stub = health_pb2_grpc.HealthStub(channel)
            await stub.Check(ask, timeout=_SOON_S, wait_for_ready=True)
        async with channel, peer("127.0.0.2", port):
            names.address = "127.0.0.2"
            answer = await _answered(stub, ask)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
