"""The port that probes ask for health, whatever else connects to it."""

import json
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
        async with open_channel(json.loads(ports.read_text())["health_address"]) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            watches = [stub.Watch(request, timeout=30) for _ in range(100)]
            for watch in watches:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await anext(aiter(watch))
                assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            answer = await stub.Check(request, timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_connection_does_not_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_host, "_PROBE_AGE_MS", 100)
    ports = tmp_path / "ports"
    async with ServiceHost(ProcessConfig(health_port=0, port_file=ports)) as host:
        await host.start([])
        async with (
            within(10),
            open_channel(json.loads(ports.read_text())["health_address"]) as channel,
        ):
            await channel.channel_ready()
            await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
