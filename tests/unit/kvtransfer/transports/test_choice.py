"""Each transport that the settings name is in the one table, which says what it needs."""

import importlib.util
from typing import Any, cast, get_args

import pytest

from diptych.errors import ConfigurationError
from kvtransfer.agents.main import LIBRARIES
from kvtransfer.config import TransferConfig, TransportName
from kvtransfer.memory import HostMemory
from kvtransfer.rank_pools import RankPools
from kvtransfer.transports import child, inside
from kvtransfer.transports.base import Transport
from kvtransfer.transports.choice import TRANSPORTS, Site, open_transport
from kvtransfer.transports.inline import InlineTransport
from kvtransfer.transports.lanes import nixl_lanes, ucxx_lanes
from kvtransfer.transports.rank_transports import RankTransports
from kvtransfer.transports.staged import StagedTransport
from tests.device_memory import DeviceMemory


def site(*, is_shared: bool, **settings: Any) -> Site:
    memory = HostMemory(bytearray(64), 16, shared_fd=0 if is_shared else None)
    config = TransferConfig(**settings)
    thread = cast(Any, None)
    return Site(config, "me", memory, 8, thread, lambda: None, read_only=True, opened={})


class Opened:
    """What stands in for a transport's class: says what it was opened with."""

    name = "opened"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.arguments, self.options = arguments, options


@pytest.fixture(autouse=True)
def _no_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "ChildTransport", type("Child", (Opened,), {}))
    monkeypatch.setattr(inside, "InsideTransport", type("Inside", (Opened,), {}))


def opened(transport: Transport) -> Opened:
    """That of one rank."""
    assert isinstance(transport, RankTransports)
    (part,) = cast(Any, transport.parts)
    assert isinstance(part, Opened)
    return part


def test_each_name_that_the_settings_know_is_in_the_table() -> None:
    assert set(get_args(TransportName)) == TRANSPORTS.keys()


def test_an_agents_process_knows_the_library_that_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    names = {
        opened(open_transport(name, site(is_shared=True))).arguments[0]
        for name in get_args(TransportName)
        if name not in ("inline", "staged")
    }
    assert names == LIBRARIES.keys()


def test_nixl_is_in_a_process_of_its_own_where_that_can_map_the_pool() -> None:
    beside = opened(open_transport("nixl", site(is_shared=True)))
    assert beside.arguments[:2] == ("nixl", nixl_lanes)
    assert beside.options == {"read_only": True}
    for where in (site(is_shared=False), site(is_shared=True, nixl_process="inside")):
        assert type(opened(open_transport("nixl", where))).__name__ == "Inside"


def test_ucxx_needs_its_module_and_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {"ucxx": True}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: modules.get(name) or None)
    transport = opened(open_transport("ucxx", site(is_shared=True)))
    assert transport.arguments[:2] == ("ucxx", ucxx_lanes)
    with pytest.raises(
        ConfigurationError, match=r"^transfer.transports: ucxx needs .*shared host memory"
    ):
        open_transport("ucxx", site(is_shared=False))
    modules.clear()
    with pytest.raises(
        ConfigurationError, match=r"^transfer.transports: .*pip install -e '\.\[ucxx\]'"
    ):
        open_transport("ucxx", site(is_shared=True))


def on_a_device(staging_bytes: int) -> Site:
    where = site(is_shared=False, staging_bytes=staging_bytes)
    return where._replace(memory=DeviceMemory(bytearray(10 * 4096), 4096))


def test_staged_beside_a_device_has_an_agent_of_bounded_host_memory() -> None:
    where = on_a_device(3 * 4096 + 1)
    pool: object = where.memory
    staged = open_transport("staged", where)
    assert isinstance(staged, StagedTransport)
    assert staged.stage is not None
    assert staged.stage.pool is pool
    assert staged.stage.slots.num_slots == staged.stage.memory.num_blocks == 3
    carrier = opened(staged._carrier)
    assert carrier.arguments[:2] == ("nixl", nixl_lanes)
    assert carrier.arguments[3:5] == ("me.staged", staged.stage.memory)
    assert staged.stage.memory.memory_kind == "DRAM"
    small = on_a_device(4096)._replace(memory=DeviceMemory(bytearray(2 * 8192), 8192))
    with pytest.raises(ConfigurationError, match=r"staging_bytes: 4096 hold no block of 8192"):
        open_transport("staged", small)


def test_staged_in_host_memory_is_the_agent_that_is_there() -> None:
    there = cast(Transport, Opened())
    staged = open_transport("staged", site(is_shared=True)._replace(opened={"nixl": there}))
    alone = open_transport("staged", site(is_shared=True))
    assert isinstance(staged, StagedTransport)
    assert isinstance(alone, StagedTransport)
    assert staged._carrier is there
    assert type(opened(alone._carrier)).__name__ == "Child"
    assert staged.stage is alone.stage is None


def test_inline_needs_nothing() -> None:
    assert isinstance(open_transport("inline", site(is_shared=False)), InlineTransport)


@pytest.mark.parametrize(
    ("settings", "kind", "of_nixl", "of_ucxx"),
    [
        ({}, "DRAM", "cma,tcp,cuda_copy", "tcp"),
        ({}, "VRAM", "cma,tcp,cuda_copy,cuda_ipc", "tcp"),
        ({"ucx_net_devices": "mlx5_0:1"}, "DRAM", "cma,rc,dc,ud,cuda_copy", "rc,dc,ud"),
        ({"ucx_tls": ("rc",)}, "DRAM", "rc", "rc"),
    ],
)
def test_ways(settings: dict[str, Any], kind: str, of_nixl: str, of_ucxx: str) -> None:
    config = TransferConfig(**settings)
    assert nixl_lanes(config, kind).ucx_tls == tuple(of_nixl.split(","))
    assert ucxx_lanes(config, kind).ucx_tls == tuple(of_ucxx.split(","))
    assert ucxx_lanes(config, kind).may_use_network
    assert nixl_lanes(config, kind).may_use_network is ("tcp" not in of_nixl)


@pytest.mark.parametrize("name", ["nixl", "ucxx", "staged"])
@pytest.mark.parametrize("nixl_process", ["child", "inside"])
def test_each_rank_has_an_agent_of_its_own(
    name: TransportName, nixl_process: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    pools = RankPools([HostMemory(bytearray(512), 256, shared_fd=0) for _ in range(2)], 256)
    where = site(is_shared=True, nixl_process=nixl_process)._replace(memory=pools)
    transport = open_transport(name, where)
    if isinstance(transport, StagedTransport):
        transport = transport._carrier
    assert isinstance(transport, RankTransports)
    opened_with = [list(part.arguments) for part in cast(Any, transport.parts)]
    for rank, (arguments, pool) in enumerate(zip(opened_with, pools.parts, strict=True)):
        assert f"me.rank-{rank}" in arguments
        assert pool in arguments


def test_ranks_whose_pools_no_process_can_map_have_none_of_their_own() -> None:
    pools = RankPools([HostMemory(bytearray(512), 256, shared_fd=fd) for fd in (0, None)], 256)
    transport = open_transport("nixl", site(is_shared=True)._replace(memory=pools))
    assert isinstance(transport, RankTransports)
    assert [type(part).__name__ for part in transport.parts] == ["Inside"] * 2
