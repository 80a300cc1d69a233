"""A proxy that the environment names is for clients, and not for processes of a cluster."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from diptych.cli.health import run
from diptych.process import ProcessConfig
from diptych.rpc.channel import open_channel
from diptych.service_host import ServiceHost
from tests.waiting import within

SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest_asyncio.fixture
async def address(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """Of a process that is well, on a machine whose proxy is not there."""
    for variable in ("no_proxy", "no_grpc_proxy", "grpc_proxy"):
        monkeypatch.delenv(variable, raising=False)
    for variable in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:1")
    async with ServiceHost(ProcessConfig()) as host:
        await host.start([])
        yield host.address


async def status(channel: grpc.aio.Channel) -> int:
    """Raises AioRpcError."""
    async with channel, within(10):
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest())
    return int(answer.status)


async def test_processes_of_a_cluster_reach_each_other_past_it(address: str) -> None:
    assert await status(open_channel(address)) == SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await status(open_channel(address, by_proxy=True))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_so_does_who_asks_for_their_health(address: str) -> None:
    assert await asyncio.to_thread(run, ["--address", address]) == 0
