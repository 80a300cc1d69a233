"""Probes of one reader wait for their turns; one that gets none in time blames no transport."""

import asyncio
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from diptych.errors import (
    BlocksExhaustedError,
    DiptychError,
    LayoutMismatchError,
    TransferInterruptedError,
)
from diptych.rpc.peer_channel import Dialer
from diptych.timers import Timers
from diptych.v1 import common_pb2, kv_source_pb2
from diptych.worker.scratch import PoolScratch
from kvtransfer.config import PROBES_AT_ONCE, TransferConfig
from kvtransfer.errors import TransportError
from kvtransfer.reader import proof
from kvtransfer.reader.fetch_driver import FetchPlan
from kvtransfer.reader.proof import LinkProver, ProbeKit
from kvtransfer.reader.proven_link import Link, RefusedLinks
from kvtransfer.reader.pull_machine import PullError, PullResult
from kvtransfer.reader.quarantine import Quarantine
from kvtransfer.transports.ways import Way

CONFIG = TransferConfig()
LINK = Link(cast(Any, None), "nixl", cast(Any, None), lambda: None)


class Probe:
    """A FetchDriver whose source takes a while, or for ever."""

    num_now = most_at_once = num_done = 0

    def __init__(self, *given: object) -> None: ...

    async def run(self) -> PullResult:
        cls = type(self)
        cls.num_now += 1
        cls.most_at_once = max(cls.most_at_once, cls.num_now)
        try:
            await self.served()
        finally:
            cls.num_now -= 1
        cls.num_done += 1
        return PullResult(stats=common_pb2.TransferStats())

    async def served(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)

    def abandon(self) -> frozenset[int]:
        return frozenset()


class Unserved(Probe):
    async def served(self) -> None:
        await asyncio.Event().wait()


class Unfinished(Unserved):
    """One of its reads writes on after it was given up."""

    def __init__(self, plan: FetchPlan, *given: object) -> None:
        self._block_ids = plan.local_block_ids

    def abandon(self) -> frozenset[int]:
        return frozenset(self._block_ids[:1])


def prover() -> tuple[LinkProver, PoolScratch]:
    scratch = PoolScratch(range(CONFIG.num_scratch_blocks))
    layout = common_pb2.KVLayout(block_size=16)
    pool = kv_source_pb2.PoolPlace()
    endpoint = SimpleNamespace(
        config=CONFIG, layout=layout, incarnation="reader", pool=pool, transports={"nixl": None}
    )
    quarantine = Quarantine(lambda _: None, lambda _: None)
    turns = asyncio.Semaphore(PROBES_AT_ONCE)
    kit = ProbeKit(cast(Any, endpoint), scratch, quarantine, Dialer(Timers()), turns, Random(1))
    channel = SimpleNamespace(
        unary_unary=lambda *_, **__: None, stream_stream=lambda *_, **__: None
    )
    return LinkProver(kit, "source", cast(Any, channel), RefusedLinks()), scratch


async def test_an_answer_that_cannot_be_read_is_a_typed_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def undecodable(*_: object, **__: object) -> None:
        """What grpc.aio returns then."""

    mine, _ = prover()
    monkeypatch.setattr(mine, "_stub", SimpleNamespace(Connect=undecodable))
    with pytest.raises(TransferInterruptedError, match="cannot be read"):
        await mine.connect(["nixl"])


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"source_incarnation": "restarted"}, TransferInterruptedError),
        ({"transport": "ucxx"}, LayoutMismatchError),
        ({"layout": common_pb2.KVLayout(block_size=32)}, LayoutMismatchError),
    ],
)
async def test_a_source_that_answers_as_another_is_not_probed(
    monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any], expected: type[DiptychError]
) -> None:
    right = {
        "source_incarnation": "source",
        "layout": common_pb2.KVLayout(block_size=16),
        "transport": "inline",
    }
    answers = [right, {**right, **wrong}]

    async def connect(*_: object, **__: object) -> kv_source_pb2.ConnectResponse:
        return kv_source_pb2.ConnectResponse(**answers.pop(0))

    mine, _ = prover()
    monkeypatch.setattr(mine, "_stub", SimpleNamespace(Connect=connect))
    await mine.connect(["nixl", "inline"])
    with pytest.raises(expected):
        await mine.connect(["nixl", "inline"])


async def test_a_hundred_probes_take_turns_and_none_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(proof, "FetchDriver", Probe)
    mine, scratch = prover()
    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        for _ in range(100):
            tasks.create_task(mine._pull_probe(LINK))
    assert Probe.num_done == 100
    assert Probe.most_at_once == PROBES_AT_ONCE
    assert not scratch.num_lent


async def test_a_probe_that_is_never_served_gives_its_turn_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(proof, "FetchDriver", Unserved)
    monkeypatch.setattr(proof, "_PROBE_S", 0.0)
    mine, scratch = prover()
    for _ in range(PROBES_AT_ONCE + 1):
        with pytest.raises(BlocksExhaustedError, match="the probe was not done"):
            await mine._pull_probe(LINK)
    assert not scratch.num_lent


async def test_a_scratch_block_that_a_read_may_still_write_is_not_lent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(proof, "FetchDriver", Unfinished)
    monkeypatch.setattr(proof, "_PROBE_S", 0.0)
    mine, scratch = prover()
    with pytest.raises(BlocksExhaustedError):
        await mine._pull_probe(LINK)
    assert scratch.num_lent == 1
    assert 0 not in scratch.allocate(CONFIG.num_scratch_blocks - 1)


class JudgedPeer:
    """Its first reads over the warm connection look as if they went another way."""

    def __init__(self, num_wrong: int) -> None:
        self.num_wrong = num_wrong
        self.num_closed = 0

    def check_lane(self) -> None:
        self.num_wrong -= 1
        if self.num_wrong >= 0:
            raise TransportError("nixl would read over TCP")


@pytest.mark.parametrize(("num_wrong", "num_probes"), [(0, 2), (1, 3), (2, 4), (3, 4)])
async def test_a_read_that_seems_to_have_gone_another_way_is_judged_by_the_next(
    monkeypatch: pytest.MonkeyPatch, num_wrong: int, num_probes: int
) -> None:
    """Of two ranks every second connection was refused: what made it was not quite over."""
    monkeypatch.setattr(proof, "FetchDriver", type("Counted", (Probe,), {"num_done": 0}))
    mine, scratch = prover()
    peer = JudgedPeer(num_wrong)

    def closed() -> None:
        peer.num_closed += 1

    async def opened(response: kv_source_pb2.ConnectResponse) -> Link:
        return Link(cast(Any, None), response.transport, cast(Any, peer), closed)

    async def on_thread(job: Callable[[], None]) -> None:
        job()

    monkeypatch.setattr(mine, "_open", opened)
    monkeypatch.setattr(mine, "_on_thread", on_thread)
    response = kv_source_pb2.ConnectResponse(transport="nixl")
    if num_wrong < 3:
        assert (await mine.prove(response)).link.peer is cast(Any, peer)
    else:
        with pytest.raises(PullError, match="over TCP"):
            await mine.prove(response)
    assert not peer.num_closed, "the next try is over the same connection"
    assert proof.FetchDriver.num_done == num_probes  # type: ignore[attr-defined]
    assert not scratch.num_lent


def test_a_way_that_is_slower_than_it_can_be_was_another() -> None:
    way = Way("VRAM to VRAM", least_bytes_per_s=4e9)
    fast = common_pb2.TransferStats(num_bytes=5 * 10**9, read_s=1.0)
    slow = common_pb2.TransferStats(num_bytes=3 * 10**9, read_s=1.0)
    assert proof._checked_rate(fast, way) == 5e9
    assert proof._checked_rate(slow, Way("")) == 3e9
    with pytest.raises(TransportError, match=r"3.00 GB/s is less than the 4 .*VRAM to VRAM"):
        proof._checked_rate(slow, way)
