"""Which ways there are between two pools: each pair of memories, over each transport."""

from typing import get_args

import pytest

from diptych.v1.kv_source_pb2 import PoolPlace
from kvtransfer.config import TransferConfig, TransportName
from kvtransfer.transports.lanes import nixl_lanes
from kvtransfer.transports.ways import NoWay, Way, common_ways, shortfalls, way_between

RDMA = "mlx5_0:1"


def place(kind: str, device_id: int = 0, machine: str = "m", devices: str = "lo") -> PoolPlace:
    """As an endpoint describes it."""
    tls = nixl_lanes(TransferConfig(ucx_net_devices=devices), kind).ucx_tls
    return PoolPlace(memory_kind=kind, device_id=device_id, machine=machine, ucx_tls=tls)


@pytest.mark.parametrize(
    ("source", "reader", "how"),
    [
        (place("DRAM"), place("DRAM"), "direct"),
        (place("DRAM"), place("DRAM", machine="n"), "direct"),  # the proof tells
        (place("VRAM"), place("VRAM", 1), "direct by CUDA IPC"),
        (place("VRAM", devices=RDMA), place("VRAM", devices=RDMA), "direct by RDMA"),
        (place("VRAM", devices=RDMA), place("DRAM", devices=RDMA), "direct by RDMA"),
        (place("DRAM", devices=RDMA), place("VRAM", devices=RDMA), "direct by RDMA"),
        (place("DRAM"), place("VRAM"), ""),
        (place("VRAM"), place("DRAM"), ""),
        (place("VRAM"), place("VRAM", machine="n"), ""),
        (place("VRAM", machine=""), place("VRAM", machine=""), ""),
        (place("VRAM", devices=RDMA), place("DRAM"), ""),
    ],
)
def test_nixl_reads_directly_what_it_reaches(
    source: PoolPlace, reader: PoolPlace, how: str
) -> None:
    way = way_between("nixl", source, reader)
    if how:
        assert isinstance(way, Way)
        assert way.text.endswith(f" at the reader, {how}")
        assert not way.staged_at_source
        assert way.least_bytes_per_s == (4e9 if how.endswith("CUDA IPC") else 0)
    else:
        assert isinstance(way, NoWay)
        assert "neither RDMA nor CUDA IPC" in way.why


@pytest.mark.parametrize("without", ["cuda_ipc", "cuda_copy"])
def test_a_ucx_without_cuda_has_no_direct_way(without: str) -> None:
    devices = RDMA if without == "cuda_copy" else "lo"
    with_it, lacking = place("VRAM", devices=devices), place("VRAM", devices=devices)
    del lacking.ucx_tls[:]
    lacking.ucx_tls.extend({"rc", "tcp"})
    for pair in ((with_it, lacking), (lacking, with_it)):
        way = way_between("nixl", *pair)
        assert isinstance(way, NoWay)
        assert ",".join(lacking.ucx_tls) in way.why


@pytest.mark.parametrize(
    ("source", "reader", "sides"),
    [
        ("VRAM", "DRAM", "source"),
        ("DRAM", "VRAM", "reader"),
        ("VRAM", "VRAM", "source and reader"),
    ],
)
def test_it_is_staged_beside_each_pool_on_a_device(source: str, reader: str, sides: str) -> None:
    way = way_between("staged", place(source), place(reader, machine="n"))
    assert isinstance(way, Way)
    assert way.text.endswith(f", staged at the {sides}")
    assert way.staged_at_source is (source == "VRAM")


def test_between_host_memories_there_is_nothing_to_stage_and_nothing_amiss() -> None:
    host = place("DRAM")
    assert isinstance(way_between("staged", host, host), NoWay)
    assert shortfalls(["staged"], host, host) == ""


def test_ucxx_knows_host_memory_only() -> None:
    assert isinstance(way_between("ucxx", place("DRAM"), place("DRAM")), Way)
    for source, reader in (("VRAM", "DRAM"), ("DRAM", "VRAM")):
        assert isinstance(way_between("ucxx", place(source), place(reader)), NoWay)


def test_every_transport_has_its_ways_and_messages_always_get_there() -> None:
    for name in get_args(TransportName):
        for kinds in (("DRAM", "DRAM"), ("VRAM", "DRAM"), ("DRAM", "VRAM"), ("VRAM", "VRAM")):
            assert way_between(name, *map(place, kinds))
    assert isinstance(way_between("inline", place("VRAM"), place("DRAM")), Way)


def test_what_is_refused_names_both_memories() -> None:
    source, reader = place("VRAM", 3), place("DRAM")
    possible, (why,) = common_ways(["nixl", "staged", "inline"], source, reader)
    assert possible == ["staged", "inline"]
    assert why.startswith("nixl: VRAM of device 3 at the source, DRAM at the reader: ")
    assert "cuda_ipc" in why
    assert shortfalls(["nixl"], source, reader) == why


def test_a_peer_that_does_not_say_is_in_host_memory() -> None:
    assert way_between("nixl", PoolPlace(), place("DRAM")) == Way(
        "DRAM at the source, DRAM at the reader, direct"
    )


def test_a_kind_that_is_not_known_has_no_way() -> None:
    for name in get_args(TransportName):
        assert isinstance(way_between(name, PoolPlace(memory_kind="TAPE"), place("DRAM")), NoWay)
