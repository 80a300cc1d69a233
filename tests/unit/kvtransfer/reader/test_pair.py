"""How a pair is proven, and looks for a better transport, over a stand-in for its source."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from diptych.errors import BlocksExhaustedError, LayoutMismatchError
from diptych.v1 import decode_pb2, kv_source_pb2, worker_pb2
from kvtransfer.config import TransferConfig
from kvtransfer.reader.pair import SourcePair
from kvtransfer.reader.proof import LinkProver
from kvtransfer.reader.proven_link import Link, ProvenLink
from kvtransfer.reader.pull_machine import PullError
from kvtransfer.transports.base import Peer

RANKED = ["nixl", "ucxx", "inline"]
NOT_NOW = PullError(decode_pb2.PULL_FAILURE_TRANSPORT, "not now")
TOOK_AGENT = PullError(decode_pb2.PULL_FAILURE_TRANSPORT, "no answer", took_agent=True)


class Source:
    """Offers some transports, of which some can be proven; a LinkProver."""

    def __init__(self, offered: set[str], good: set[str]) -> None:
        self.offered = offered
        self.good = good
        self.num_asked = 0
        self.tried: list[str] = []
        self.closed: list[str] = []
        self.usable = True  # what it is read by, from now on
        self.agent = b"first"  # its own
        self.before_proof: Callable[[], None] = lambda: None

    async def connect(self, wanted: list[str]) -> kv_source_pb2.ConnectResponse:
        await asyncio.sleep(0)
        self.num_asked += 1
        common = [name for name in wanted if name in self.offered]
        if not common:
            raise LayoutMismatchError(f"transports: {wanted}, {self.offered}")
        memory = kv_source_pb2.MemoryDescriptor(agent_metadata=self.agent)
        return kv_source_pb2.ConnectResponse(transport=common[0], memory=memory)

    async def prove(self, response: kv_source_pb2.ConnectResponse) -> ProvenLink:
        await asyncio.sleep(0)
        self.tried.append(response.transport)
        self.before_proof()
        if response.transport not in self.good:
            raise NOT_NOW
        return ProvenLink(self.link(response.transport), 2e9)

    def link(self, transport: str) -> Link:
        peer = cast(Peer, SimpleNamespace(usable=self.usable))
        return Link(cast(Any, None), transport, peer, lambda: self.closed.append(transport))


class Pair(SourcePair):
    """Proven by the test at first, where ``transport`` is given."""

    def __init__(self, source: Source, transport: str = "", reprove_s: float = 0.001) -> None:
        self.num_dialled = 0
        self.ours = {name: SimpleNamespace(ready=True, problem="") for name in RANKED}
        config = TransferConfig(reprove_s=reprove_s, reconnect_min_s=0.001)
        kit: Any = SimpleNamespace(
            endpoint=SimpleNamespace(transports=self.ours, config=config),
            dialer=SimpleNamespace(identity=None, open=self._dial),
            random=Random(0),
        )
        key: Any = SimpleNamespace(address="address", incarnation="incarnation")
        self.num_changes = 0
        super().__init__(key, kit, self._changed_once, lambda: None, lambda _: None)
        self._source = source
        if transport:
            self._machine.prove(ProvenLink(source.link(transport), 1e9), "nixl: refused")
        self.num_changes = 0

    def _dial(self, address: str, role: str) -> object:
        self.num_dialled += 1
        raise ssl.SSLError("no certificate")

    def _changed_once(self) -> None:
        self.num_changes += 1

    async def prove(self) -> None:
        async with asyncio.timeout(2):
            await self._prove(cast(LinkProver, self._source))

    @asynccontextmanager
    async def improving(self) -> AsyncIterator[None]:
        async with asyncio.timeout(2), asyncio.TaskGroup() as tasks:
            task = tasks.create_task(self._keep_improving(cast(LinkProver, self._source)))
            yield
            task.cancel()

    async def until_over(self, transport: str) -> Link:
        while self.link is None or self.link.transport != transport:
            assert self.to_proto().state == worker_pb2.PAIR_STATE_PROVEN
            await asyncio.sleep(0)
        return self.link


async def test_it_takes_the_best_that_works_and_goes_on_looking() -> None:
    source = Source(offered=set(RANKED), good={"ucxx"})
    pair = Pair(source, "inline")
    async with pair.improving():
        await pair.until_over("ucxx")
        assert source.closed == ["inline"]
        proto = pair.to_proto()
        assert proto.bytes_per_s == 2e9
        assert proto.message == "nixl: not now"
        source.good.add("nixl")
        await pair.until_over("nixl")
        assert source.closed == ["inline", "ucxx"]
        assert pair.to_proto().message == ""
        num_tried = len(source.tried)
        await asyncio.sleep(0.01)
        assert len(source.tried) == num_tried  # there is nothing better
    assert pair.num_changes == 2


async def test_attempts_that_fail_change_nothing() -> None:
    source = Source(offered=set(RANKED), good=set())
    pair = Pair(source, "ucxx")
    link, before = pair.link, pair.to_proto()

    def exhausted_at_times() -> None:
        if len(source.tried) % 2:
            raise BlocksExhaustedError("need 4 scratch blocks, 0 free")

    source.before_proof = exhausted_at_times
    async with pair.improving():
        while len(source.tried) < 5:
            await asyncio.sleep(0)
    assert set(source.tried) == {"nixl"}  # never a worse one
    assert pair.link is link
    assert pair.to_proto() == before
    assert not pair.num_changes
    assert not source.closed


async def test_a_source_that_offers_nothing_better_is_not_probed() -> None:
    source = Source(offered={"inline"}, good={"inline"})
    async with Pair(source, "inline").improving():
        await asyncio.sleep(0.01)
    assert not source.tried


async def test_a_fetch_under_way_keeps_the_link_it_began_over() -> None:
    source = Source(offered=set(RANKED), good={"nixl"})
    pair = Pair(source, "inline")
    assert pair.link is not None
    async with pair.improving():
        with pair.link.fetching():
            await pair.until_over("nixl")
            assert not source.closed
        assert source.closed == ["inline"]


async def test_a_pair_lost_meanwhile_is_left_to_be_proven_anew() -> None:
    source = Source(offered=set(RANKED), good={"nixl"})
    pair = Pair(source, "inline")
    source.before_proof = lambda: pair.lost("its process ended")
    async with pair.improving():
        while not source.tried:
            await asyncio.sleep(0)
        await asyncio.sleep(0.005)
    assert pair.link is None
    assert pair.to_proto().state == worker_pb2.PAIR_STATE_CONNECTING
    assert sorted(source.closed) == ["inline", "nixl"]


async def test_only_a_mismatch_of_all_transports_is_final() -> None:
    """Else it says no more than that the source has none but those that failed just now."""
    source = Source(offered={"nixl"}, good=set())
    pair = Pair(source)
    with pytest.raises(PullError, match="nixl: not now"):
        await pair.prove()
    source.good.add("nixl")
    await pair.prove()
    assert pair.to_proto().transport == "nixl"
    with pytest.raises(LayoutMismatchError):
        await Pair(Source(offered={"pigeon"}, good=set())).prove()


async def test_an_agent_that_cannot_start_leaves_its_turn_to_the_next() -> None:
    source = Source(offered=set(RANKED), good=set(RANKED))
    pair = Pair(source)
    pair.ours["nixl"].problem = "no such device"
    await pair.prove()
    assert pair.to_proto().transport == "ucxx"
    assert pair.message == "nixl: no such device"
    assert source.tried == ["ucxx"]
    async with pair.improving():
        await asyncio.sleep(0.005)
        assert source.tried == ["ucxx"]
        pair.ours["nixl"].problem = ""
        await pair.until_over("nixl")


async def test_a_link_whose_agent_ended_after_the_probes_is_never_proven() -> None:
    source = Source(offered={"nixl"}, good={"nixl"})
    pair = Pair(source)
    states: list[worker_pb2.PairState] = []

    def agent_ends_once() -> None:
        states.append(pair.to_proto().state)
        source.usable = len(source.tried) > 1

    source.before_proof = agent_ends_once
    await pair.prove()
    assert states == [worker_pb2.PAIR_STATE_CONNECTING] * 2
    assert source.closed == ["nixl"]
    assert pair.link is not None

    source = Source(offered=set(RANKED), good={"nixl"})
    pair = Pair(source, "inline")
    source.usable = False
    async with pair.improving():
        while len(source.tried) < 3:
            await asyncio.sleep(0)
    assert pair.to_proto().transport == "inline"
    assert "inline" not in source.closed


def takes_agent_over_nixl(source: Source) -> None:
    def take_agent() -> None:
        if source.tried[-1] == "nixl":
            raise TOOK_AGENT

    source.before_proof = take_agent


async def test_a_source_that_took_our_agent_is_not_tried_again_the_same_way_for_now() -> None:
    """Nor when its pair is lost meanwhile: each try costs the others all that they read."""
    source = Source(offered={"nixl", "inline"}, good={"inline"})
    takes_agent_over_nixl(source)
    pair = Pair(source, reprove_s=60)
    await pair.prove()
    assert source.tried == ["nixl", "inline"]
    pair.lost("the connection broke")
    await pair.prove()
    assert source.tried == ["nixl", "inline", "inline"]
    assert pair.to_proto().transport == "inline"
    assert pair.message == "nixl: no answer"

    source = Source(offered={"nixl"}, good=set())
    takes_agent_over_nixl(source)
    pair = Pair(source, reprove_s=60)
    for _ in range(3):
        with pytest.raises(PullError, match="nixl: no answer"):
            await pair.prove()
    assert source.tried == ["nixl"]


async def test_a_source_whose_reads_break_our_agent_is_tried_twice() -> None:
    source = Source(offered={"nixl", "inline"}, good={"inline"})

    def break_agent() -> None:
        if source.tried[-1] == "nixl":
            lost = decode_pb2.PULL_FAILURE_SOURCE_LOST
            raise PullError(lost, "lost the source", agent_lost=True, broke_agent=True)

    source.before_proof = break_agent
    pair = Pair(source, reprove_s=60)
    for _ in range(3):
        await pair.prove()
        assert source.tried[:3] == ["nixl", "nixl", "inline"]
        assert source.tried.count("nixl") == 2
        assert pair.message == "nixl: lost the source"
        pair.lost("the connection broke")
    source.before_proof = lambda: None
    source.good.add("nixl")
    source.agent = b"next"
    await pair.prove()
    assert pair.to_proto().transport == "nixl"


class Clock:
    """Of pairs: their seconds pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("kvtransfer.reader.pair.time", clock)
    return clock


@pytest.mark.parametrize("ours", [["nixl"], RANKED])
async def test_where_nothing_else_works_it_is_tried_again_as_often_as_better_ones(
    clock: Clock, ours: list[str]
) -> None:
    source = Source(offered={"nixl"}, good=set())
    takes_agent_over_nixl(source)
    pair = Pair(source, reprove_s=60)
    for name in set(pair.ours) - set(ours):
        del pair.ours[name]
    for num_tried in range(1, 9):
        for _ in range(3):  # it is not asked as often as the pair is tried
            with pytest.raises(PullError, match="nixl: no answer"):
                await pair.prove()
        assert source.tried == ["nixl"] * num_tried
        clock.now += 60
    source.before_proof = lambda: None
    source.good.add("nixl")
    await pair.prove()
    assert pair.to_proto().transport == "nixl"


async def test_what_something_else_works_beside_rests_longer(clock: Clock) -> None:
    source = Source(offered={"nixl", "inline"}, good={"inline"})
    takes_agent_over_nixl(source)
    pair = Pair(source, reprove_s=60)
    for _ in range(100):
        await pair.prove()
        pair.lost("the connection broke")
        clock.now += 60
    assert 6 < source.tried.count("nixl") < 20


async def test_another_agent_of_the_source_is_tried_at_once(clock: Clock) -> None:
    source = Source(offered={"nixl", "inline"}, good={"inline"})
    takes_agent_over_nixl(source)
    pair = Pair(source, reprove_s=60)
    for agent in (b"first", b"second", b"third"):
        source.agent = agent
        await pair.prove()
        pair.lost("the connection broke")
    assert source.tried == ["nixl", "inline", "nixl", "inline", "inline"], "it is not the agent"
    clock.now += 30
    source.before_proof = lambda: None
    source.good.add("nixl")
    await pair.prove()
    assert pair.to_proto().transport == "nixl"


async def test_a_source_that_took_our_agent_is_tried_again_later() -> None:
    source = Source(offered={"nixl", "inline"}, good={"inline"})
    takes_agent_over_nixl(source)
    pair = Pair(source)
    await pair.prove()
    async with pair.improving():
        while len(source.tried) < 5:
            await asyncio.sleep(0)
        assert pair.to_proto().transport == "inline"
        source.before_proof = lambda: None
        source.good.add("nixl")
        await pair.until_over("nixl")
    assert pair.message == ""


async def test_a_source_that_cannot_be_dialled_is_tried_again() -> None:
    pair = Pair(Source(offered=set(RANKED), good=set(RANKED)))
    async with asyncio.timeout(2), asyncio.TaskGroup() as tasks:
        task = tasks.create_task(pair.keep())
        while pair.num_dialled < 2:
            await asyncio.sleep(0)
        assert pair.to_proto().state == worker_pb2.PAIR_STATE_FAILED
        assert "no certificate" in pair.message
        task.cancel()
