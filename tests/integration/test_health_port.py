"""The port that probes ask for health, whatever else connects to it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from diptych import service_host
from diptych.process import ProcessConfig
from diptych.rpc.channel import open_channel
from diptych.service_host import ServiceHost
from tests.waiting import within


async def test_many_who_would_watch_keep_no_probe_out(tmp_path: Path) -> None:
    ports = tmp_path / "ports"
    request = health_pb2.HealthCheckRequest()
    async with ServiceHost(ProcessConfig(health_port=0, port_file=ports)) as host:
        await host.start([])
        address = json.loads(ports.read_text())["health_address"]
        async with AsyncExitStack() as stack, open_channel(address) as channel:
            watches = []
            for _ in range(25):
                other = await stack.enter_async_context(open_channel(address))
                asking = health_pb2_grpc.HealthStub(other)
                watches += [asking.Watch(request, timeout=30) for _ in range(4)]
            stub = health_pb2_grpc.HealthStub(channel)
            for watch in watches:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await anext(aiter(watch))
                assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            answer = await stub.Check(request, timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_calls_that_ask_nothing_keep_no_probe_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One connection has not all places, and none is kept for long."""
    monkeypatch.setattr(service_host, "_PROBE_PATIENCE_S", 0.5)
    ports = tmp_path / "ports"
    request = health_pb2.HealthCheckRequest()
    async with ServiceHost(ProcessConfig(health_port=0, port_file=ports)) as host:
        await host.start([])
        address = json.loads(ports.read_text())["health_address"]
        async with within(20), open_channel(address) as silent, open_channel(address) as channel:
            check = silent.stream_unary(
                "/grpc.health.v1.Health/Check",
                request_serializer=bytes,
                response_deserializer=bytes,
            )
            await silent.channel_ready()
            calls = [check(_nothing()) for _ in range(100)]
            await asyncio.sleep(0.1)
            stub = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(request, timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            assert await calls[0].code() is grpc.StatusCode.ABORTED
            for call in calls:
                call.cancel()


async def _nothing() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


async def test_a_connection_does_not_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_host, "_PROBE_AGE_S", 0.1)
    ports = tmp_path / "ports"
    async with ServiceHost(ProcessConfig(health_port=0, port_file=ports)) as host:
        await host.start([])
        async with (
            within(10),
            open_channel(json.loads(ports.read_text())["health_address"]) as channel,
        ):
            await channel.channel_ready()
            await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
