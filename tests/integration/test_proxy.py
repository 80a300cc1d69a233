"""A proxy that the environment names is for clients, and not for processes of a cluster."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from diptych.cli.health import run
from diptych.process import ProcessConfig
from diptych.rpc.channel import is_loopback, open_channel
from diptych.service_host import ServiceHost
from tests.waiting import within

SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest_asyncio.fixture
async def address(no_proxy_is_there: None) -> AsyncIterator[str]:
    """Of a process that is well."""
    async with ServiceHost(ProcessConfig()) as host:
        await host.start([])
        yield host.address


@pytest.fixture
def no_proxy_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine whose environment names one."""
    for variable in ("no_proxy", "no_grpc_proxy", "grpc_proxy"):
        monkeypatch.delenv(variable, raising=False)
    for variable in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:1")


async def status(channel: grpc.aio.Channel) -> int:
    """Raises AioRpcError."""
    async with channel, within(10):
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest())
    return int(answer.status)


async def test_processes_of_a_cluster_reach_each_other_past_it(address: str) -> None:
    assert await status(open_channel(address)) == SERVING


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "dns:localhost"])
async def test_so_do_clients_where_it_is_on_their_own_machine(address: str, host: str) -> None:
    port = address.rpartition(":")[2]
    assert await status(open_channel(f"{host}:{port}", by_proxy=True)) == SERVING


async def test_other_addresses_clients_ask_by_the_proxy_unless_told_otherwise(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, name = address.rpartition(":")[2], "0.0.0.0"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await status(open_channel(f"{name}:{port}", by_proxy=True))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    monkeypatch.setenv("no_proxy", name)
    assert await status(open_channel(f"{name}:{port}", by_proxy=True)) == SERVING


@pytest.mark.parametrize(
    ("address", "is_own"),
    [
        ("localhost:1", True),
        ("LocalHost:1", True),
        ("localhost", True),
        ("127.0.0.1:1", True),
        ("127.9.9.9:1", True),
        ("[::1]:1", True),
        ("::1", True),
        ("dns:///localhost:1", True),
        ("dns://8.8.8.8/localhost:1", True),
        ("ipv4:127.0.0.1:1", True),
        ("ipv6:[::1]:1", True),
        ("router:1", False),
        ("localhost.example.org:1", False),
        ("10.0.0.1:1", False),
        ("[fd00::1]:1", False),
        ("dns:///router:1", False),
        ("unix:/run/router", False),
        ("", False),
    ],
)
def test_which_addresses_are_of_ones_own_machine(address: str, is_own: bool) -> None:
    assert is_loopback(address) is is_own


async def test_so_does_who_asks_for_their_health(address: str) -> None:
    assert await asyncio.to_thread(run, ["--address", address]) == 0
