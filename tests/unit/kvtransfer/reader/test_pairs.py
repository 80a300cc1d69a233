"""Which pairs are kept, and whose agent is torn down, over stand-ins for both."""

import asyncio
import time
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from diptych.rpc.peer_channel import Dialer
from diptych.timers import Timers
from diptych.v1 import common_pb2
from kvtransfer.config import TransferConfig
from kvtransfer.endpoint import TransferEndpoint
from kvtransfer.errors import UndeadAgentError
from kvtransfer.memory import HostMemory
from kvtransfer.reader.pair import SourcePair
from kvtransfer.reader.pairs import PairTable, PeerKey
from kvtransfer.reader.quarantine import ReadRecord


class NoScratch:
    def allocate(self, num_blocks: int) -> list[int]:
        raise AssertionError("nothing is probed")

    def free(self, block_ids: object) -> None: ...


def make_table() -> PairTable:
    """Of a pool of 100 blocks."""
    memory = HostMemory(bytearray(1600), 16)
    return PairTable(
        TransferEndpoint(TransferConfig(), "reader", common_pb2.KVLayout(), memory),
        scratch=NoScratch(),
        dialer=Dialer(Timers()),
        on_change=lambda: None,
        on_quarantine=lambda _: None,
        on_quarantine_end=lambda _: None,
    )


async def test_sources_of_a_router_that_left_are_kept_until_it_can_be_taken_for_lost() -> None:
    """One that is back in time names them again, and finds the pairs that it had."""
    table = make_table()
    sources = [PeerKey(f"127.0.0.1:{port}", "source") for port in (1, 2)]
    table.set_peers("a", sources)
    before = dict(table._pairs)
    table.leave("a")
    left_s = time.monotonic()
    table._forget_left(left_s)
    assert table._pairs == before
    table.set_peers("b", sources[:1])
    table._forget_left(left_s + Timers().lost_peer_s)
    assert table._pairs == {sources[0]: before[sources[0]]}


async def test_a_source_named_again_at_once_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[SourcePair] = []

    async def keep(self: SourcePair) -> None:
        kept.append(self)
        try:
            await asyncio.Event().wait()
        finally:
            kept.remove(self)

    monkeypatch.setattr(SourcePair, "keep", keep)
    table = make_table()
    source = PeerKey("127.0.0.1:1", "source")
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(table.run())
        table.set_peers("a", [source])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        (before,) = kept
        table.set_peers("a", [])  # the router left,
        table.set_peers("b", [source])  # and another one came, before anything else ran
        for _ in range(5):
            await asyncio.sleep(0)
        (after,) = kept
        assert after is not before
        running.cancel()
    assert not kept


class Orphans(NamedTuple):
    """Reads that nobody waits for, one for each block."""

    transport: str
    num_blocks: int
    age_s: float


@pytest.mark.parametrize(
    ("orphans", "torn_down"),
    [
        ([Orphans("nixl", 1, 10.5)], ["nixl"]),
        ([Orphans("nixl", 1, 9.5)], []),
        ([Orphans("nixl", 6, 1.5)], ["nixl"]),
        ([Orphans("nixl", 5, 1.5)], []),
        ([Orphans("nixl", 6, 0.5)], []),
        ([Orphans("nixl", 5, 1.5), Orphans("nixl", 20, 0.5)], []),
        ([Orphans("nixl", 1, 10.5), Orphans("ucxx", 5, 1.5)], ["nixl"]),
        ([Orphans("nixl", 6, 1.5), Orphans("ucxx", 6, 0.5)], ["nixl"]),
        ([Orphans("nixl", 3, 1.5), Orphans("ucxx", 3, 1.5)], ["nixl", "ucxx"]),
    ],
)
async def test_an_agent_is_torn_down_for_an_old_read_or_for_many(
    monkeypatch: pytest.MonkeyPatch, orphans: list[Orphans], torn_down: list[str]
) -> None:
    """For one older than 10 s, or for such of 5 % of the blocks that are older than 1 s."""
    monkeypatch.setattr("kvtransfer.reader.pairs._REAP_INTERVAL_S", 0)
    table = make_table()
    now, first = time.monotonic(), 0
    reads: list[ReadRecord] = []
    for transport, num_blocks, age_s in orphans:
        block_ids = range(first, first + num_blocks)
        group = [ReadRecord(frozenset({block_id}), transport) for block_id in block_ids]
        table._quarantine.orphan(group, now - age_s)
        reads += group
        first += num_blocks
    rebuilt: list[str] = []

    async def rebuild(transport: str) -> None:
        rebuilt.append(transport)
        for read in reads:
            if read.transport == transport:
                table._quarantine.ended(read)

    monkeypatch.setattr(table._endpoint, "rebuild", rebuild)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(table.run())
        for _ in range(20):
            await asyncio.sleep(0)
        running.cancel()
    assert sorted(rebuilt) == torn_down
    assert table.counters.num_agent_teardowns == len(torn_down)


async def test_an_agent_that_does_not_go_keeps_nothing_else_from_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may hang in the system: others are torn down, and routers that left are forgotten."""
    monkeypatch.setattr("kvtransfer.reader.pairs._REAP_INTERVAL_S", 0)
    table = make_table()
    asked: list[str] = []

    async def rebuild(transport: str) -> None:
        asked.append(transport)
        await asyncio.Event().wait()

    monkeypatch.setattr(table._endpoint, "rebuild", rebuild)
    old_s = time.monotonic() - 60.0
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(table.run())
        table._quarantine.orphan([ReadRecord(frozenset({1}), "nixl")], old_s)
        for _ in range(20):
            await asyncio.sleep(0)
        assert asked == ["nixl"]
        table.set_peers("router", [PeerKey("127.0.0.1:1", "source")])
        table._left["router"] = old_s
        table._quarantine.orphan([ReadRecord(frozenset({2}), "ucxx")], old_s)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not table._pairs
        running.cancel()
    assert asked == ["nixl", "ucxx"]  # each once, for as long as it takes
    assert table.counters.num_agent_teardowns == 2


async def test_the_other_agents_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = make_table()._endpoint
    rebuilt: list[str] = []
    for name in ("nixl", "ucxx"):
        transport = SimpleNamespace(
            rebuild=lambda name=name: rebuilt.append(name), retiring=False, undead=None
        )
        monkeypatch.setitem(endpoint.transports, name, transport)
    endpoint.thread.start()
    try:
        await endpoint.rebuild("ucxx")
    finally:
        endpoint.thread.stop()
    assert rebuilt == ["ucxx"]


async def test_an_agent_that_cannot_be_ended_ends_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtransfer.reader.pairs._REAP_INTERVAL_S", 0)
    table = make_table()
    undead = SimpleNamespace(retiring=True, undead=UndeadAgentError("it lives"))
    monkeypatch.setitem(table._endpoint.transports, "nixl", undead)
    with pytest.raises(ExceptionGroup) as caught:
        await table.run()
    assert caught.group_contains(UndeadAgentError)


async def test_a_router_that_names_any_number_of_sources_gets_so_many_connections(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvtransfer.reader.pairs.MAX_PAIRS", 3)
    table = make_table()
    sources = [PeerKey(f"127.0.0.1:{port}", "source") for port in range(1, 6)]
    table.set_peers("a", sources[:2])
    table.set_peers("b", reversed(sources))
    assert [pair.source_address for pair in table.pairs()] == [key.address for key in sources[:3]]
    assert "too many sources" in caplog.text
    table.set_peers("a", [])
    table.set_peers("b", sources[3:])
    assert [pair.source_address for pair in table.pairs()] == [key.address for key in sources[3:]]
