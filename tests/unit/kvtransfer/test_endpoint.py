"""Layouts are compared whole, and each end has a name of its own."""

import asyncio
import threading

import pytest

from diptych.errors import ConfigurationError, LayoutMismatchError
from diptych.v1 import common_pb2
from kvtransfer import endpoint as endpoints
from kvtransfer.config import TransferConfig, TransportName
from kvtransfer.endpoint import TransferEndpoint, compare_layouts, stretch_bytes
from kvtransfer.memory import HostMemory
from kvtransfer.transports.base import Transport
from kvtransfer.transports.choice import Site, open_transport
from kvtransfer.transports.inline import InlineTransport
from tests.waiting import until


def test_every_field_of_a_layout_counts() -> None:
    for field in common_pb2.KVLayout.DESCRIPTOR.fields:
        ours, theirs = common_pb2.KVLayout(), common_pb2.KVLayout()
        compare_layouts(ours, theirs)
        if field.name in ("groups", "tensor_parallel_size"):
            continue  # see below
        value = "x" if isinstance(getattr(theirs, field.name), str) else 7
        setattr(theirs, field.name, value)
        with pytest.raises(LayoutMismatchError, match=f"^{field.name}: .*{value!r}") as excinfo:
            compare_layouts(ours, theirs)
        assert excinfo.value.metadata["field"] == field.name


GROUP = {
    "kind": common_pb2.KV_KIND_SLIDING,
    "window": 7,
    "layers": [2],
    "num_kv_heads": 7,
    "head_dim": 7,
    "dtype": "x",
    "block_bytes": 7,
}


def test_every_field_of_a_group_of_layers_counts() -> None:
    assert list(GROUP) == [field.name for field in common_pb2.KVGroup.DESCRIPTOR.fields]
    full = common_pb2.KVGroup(kind=common_pb2.KV_KIND_FULL)
    for name, value in GROUP.items():
        ours, theirs = (common_pb2.KVLayout(groups=[full, full]) for _ in range(2))
        compare_layouts(ours, theirs)
        theirs.groups[1].MergeFrom(common_pb2.KVGroup(**{name: value}))  # type: ignore[arg-type]
        with pytest.raises(LayoutMismatchError) as excinfo:
            compare_layouts(ours, theirs)
        assert excinfo.value.metadata["field"] == f"groups[1].{name}"
        assert excinfo.value.message.endswith(f"the source has {getattr(theirs.groups[1], name)!r}")


def test_another_number_of_groups_is_told() -> None:
    ours, theirs = common_pb2.KVLayout(), common_pb2.KVLayout(groups=[common_pb2.KVGroup()])
    with pytest.raises(LayoutMismatchError, match=r"^groups: the reader has 0, the source has 1$"):
        compare_layouts(ours, theirs)


def test_caches_of_other_element_types_are_no_pair() -> None:
    """Even where the blocks happen to be as large."""
    ours, theirs = (
        common_pb2.KVLayout(dtype=dtype, block_bytes=4096) for dtype in ("float32", "int8")
    )
    with pytest.raises(LayoutMismatchError, match=r"^dtype: .*float32.*int8") as excinfo:
        compare_layouts(ours, theirs)
    assert excinfo.value.metadata["field"] == "dtype"


@pytest.mark.parametrize(("ours", "theirs"), [(1, 2), (2, 1), (2, 3), (6, 1), (0, 1)])
def test_ranks_that_heads_divide_by_are_a_pair(ours: int, theirs: int) -> None:
    """Whoever tells of none is of one."""
    compare_layouts(
        common_pb2.KVLayout(num_kv_heads=6, tensor_parallel_size=ours),
        common_pb2.KVLayout(num_kv_heads=6, tensor_parallel_size=theirs),
    )


@pytest.mark.parametrize(("ours", "theirs"), [(2, 4), (4, 2), (1, 12)])
def test_other_ranks_are_refused_with_both_numbers(ours: int, theirs: int) -> None:
    with pytest.raises(
        LayoutMismatchError,
        match=rf"^tensor_parallel_size: the reader has {ours}, the source has {theirs}: "
        rf"{max(ours, theirs)} cannot share 6 key-value heads evenly$",
    ) as excinfo:
        compare_layouts(
            common_pb2.KVLayout(num_kv_heads=6, tensor_parallel_size=ours),
            common_pb2.KVLayout(num_kv_heads=6, tensor_parallel_size=theirs),
        )
    assert excinfo.value.metadata["field"] == "tensor_parallel_size"


def test_a_stretch_is_all_heads_of_a_layers_keys() -> None:
    layout = common_pb2.KVLayout(num_layers=3, block_bytes=3 * 2 * 5 * 128, num_kv_heads=5)
    assert stretch_bytes(layout) == 5 * 128


async def test_no_two_ends_of_a_process_call_their_agents_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names: list[str] = []

    def noted(transport: TransportName, site: Site) -> Transport:
        names.append(site.agent_name)
        return open_transport(transport, site)

    monkeypatch.setattr(endpoints, "open_transport", noted)
    config, memory = TransferConfig(transports=("inline",)), HostMemory(bytearray(64), 16)
    layout = common_pb2.KVLayout(digest_level=config.digest_level, block_bytes=16)
    for name in ("prefill", "decode", ""):
        end = await TransferEndpoint.open(
            config, incarnation="w-1", layout=layout, memory=memory, name=name
        )
        await end.close()
    assert names == ["w-1.prefill", "w-1.decode", "w-1"]


async def test_a_library_that_hangs_as_it_is_opened_ends_that_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker tells it, instead of starting for ever."""
    goes_on = threading.Event()
    monkeypatch.setattr(endpoints, "open_transport", lambda name, site: goes_on.wait())
    monkeypatch.setattr(endpoints, "_OPEN_S", 0.01)
    monkeypatch.setattr(endpoints, "_CLOSE_S", 0.01)
    config = TransferConfig(transports=["nixl"])
    layout = common_pb2.KVLayout(digest_level=config.digest_level, block_bytes=16)
    try:
        with pytest.raises(ConfigurationError, match=r"^transfer.transports: nixl: .* hangs"):
            await TransferEndpoint.open(
                config, incarnation="i", layout=layout, memory=HostMemory(bytearray(64), 16)
            )
    finally:
        goes_on.set()


async def test_a_source_serves_on_for_a_while_after_its_last_fetch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reads that were under way as it ended need it."""
    told: list[bool] = []

    class Noted(InlineTransport):
        def serve(self, active: bool) -> None:
            told.append(active)

    monkeypatch.setattr(endpoints, "open_transport", lambda name, site: Noted(site.memory))
    monkeypatch.setattr(endpoints, "_SERVE_ON_S", 0.2)
    config = TransferConfig(transports=("inline",))
    layout = common_pb2.KVLayout(digest_level=config.digest_level, block_bytes=16)
    end = await TransferEndpoint.open(
        config, incarnation="i", layout=layout, memory=HostMemory(bytearray(64), 16)
    )
    with end.serving(), end.serving():
        await until(lambda: told == [True, True], what="each fetch has it look often")
        end.expect_reads()
        await until(lambda: told == [True] * 3, what="and each probe of a connection")
    with end.serving():
        await asyncio.sleep(0.3)
        assert False not in told, "the second one came within that time"
    await until(lambda: told[-1] is False)
    end.expect_reads()
    await end.thread.call(lambda: None)
    assert told[-1] is False, "nobody is served"
    with end.serving():
        pass
    await end.close()
    await asyncio.sleep(0.3)
    assert (told.count(False), told[-1]) == (1, True), "nothing is told to what is closed"


async def test_agents_that_have_started_are_closed_where_the_next_cannot_be_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[str] = []
    threads: list[threading.Thread] = []

    class Noted(InlineTransport):
        def close(self) -> None:
            closed.append(self.name)

    def opened(name: TransportName, site: Site) -> Transport:
        threads.append(threading.current_thread())
        if name == "inline":
            return Noted(site.memory)
        raise ConfigurationError("ucxx is not installed")

    monkeypatch.setattr(endpoints, "open_transport", opened)
    config = TransferConfig(transports=("inline", "ucxx"))
    layout = common_pb2.KVLayout(digest_level=config.digest_level, block_bytes=16)
    with pytest.raises(ConfigurationError, match="not installed"):
        await TransferEndpoint.open(
            config, incarnation="i", layout=layout, memory=HostMemory(bytearray(64), 16)
        )
    assert closed == ["inline"]
    assert len(threads) == 2
    assert not any(thread.is_alive() for thread in threads), "nor is their thread left"
