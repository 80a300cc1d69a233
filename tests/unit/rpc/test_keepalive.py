"""Both ends of a connection are pinged as the timers say, and it lasts while nobody calls."""

import asyncio
import functools
from typing import Any

import grpc
import pytest

from diptych.rpc.channel import open_channel
from diptych.rpc.server import PublicEdge, make_server
from diptych.timers import Timers
from diptych.v1 import worker_pb2, worker_pb2_grpc


def test_channel_and_server_take_the_timers(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[dict[str, int]] = []

    def capture(*args: object, options: list[tuple[str, int]], **more: Any) -> None:
        opened.append(dict(options))

    monkeypatch.setattr(grpc.aio, "insecure_channel", capture)
    monkeypatch.setattr(grpc.aio, "server", capture)
    timers = Timers(keepalive_s=0.25, keepalive_answer_s=1.5)
    open_channel("127.0.0.1:1", timers)
    make_server(timers)
    for options in opened:
        assert options["grpc.keepalive_time_ms"] == 250
        assert options["grpc.keepalive_timeout_ms"] == 1500
        assert options["grpc.http2.ping_timeout_ms"] == 1500
    assert len(opened) == 2


async def test_a_connection_on_which_nobody_calls_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if gRPC ended it after 100 ms without a call, not after half an hour."""
    insecure_channel = grpc.aio.insecure_channel

    @functools.wraps(insecure_channel)
    def impatient(address: str, options: list[tuple[str, int]]) -> grpc.aio.Channel:
        assumed = ("grpc.client_idle_timeout_ms", 100)  # of two such options the first one counts
        return insecure_channel(address, options=[*options, assumed])

    monkeypatch.setattr(grpc.aio, "insecure_channel", impatient)
    server = make_server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = open_channel(f"127.0.0.1:{port}")
    try:
        stub: worker_pb2_grpc.WorkerAsyncStub = worker_pb2_grpc.WorkerStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="UNIMPLEMENTED"):
            await stub.EndTraces(worker_pb2.EndTracesRequest())
        state = channel.get_state()
        assert state is grpc.ChannelConnectivity.READY
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await channel.wait_for_state_change(state)
    finally:
        await channel.close(None)
        await server.stop(None)


def test_clients_may_pause_for_longer_than_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}

    def capture(options: list[tuple[str, int]], maximum_concurrent_rpcs: int, **_: Any) -> None:
        assert len(dict(options)) == len(options)
        made.update(options)
        made["maximum_concurrent_rpcs"] = maximum_concurrent_rpcs

    monkeypatch.setattr(grpc.aio, "server", capture)
    edge = PublicEdge(
        max_connections=8,
        max_served=3,
        max_concurrent_rpcs=7,
        max_concurrent_streams=5,
        max_receive_bytes=4096,
        max_slow=10,
        max_connection_age_s=60,
        max_connection_grace_s=9,
        body_patience_s=30,
    )
    make_server(Timers(keepalive_s=0.25, keepalive_answer_s=1.5), edge)
    assert made["grpc.keepalive_time_ms"] == 30_000
    assert made["grpc.keepalive_timeout_ms"] == made["grpc.http2.ping_timeout_ms"] == 20_000
    assert made["grpc.max_connection_age_ms"] == 60_000
    assert made["grpc.max_connection_age_grace_ms"] == 9_000
    assert made["maximum_concurrent_rpcs"] == 7
    assert made["grpc.max_concurrent_streams"] == 5
    assert made["grpc.max_receive_message_length"] == 4096
