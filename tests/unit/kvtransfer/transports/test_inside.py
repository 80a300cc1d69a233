"""The agent inside the worker: replaced when a read breaks, without hurting the others."""

import gc
from collections.abc import Callable
from typing import Any, cast

import pytest

from kvtransfer.config import TransferConfig
from kvtransfer.errors import AgentLostError, SourceLostError, TransportError
from kvtransfer.memory import HostMemory
from kvtransfer.transports.inside import InsidePeer, InsideTransport
from tests import nixl_library
from tests.nixl_library import DisconnectError, RawAgent


class Thread:
    """Polls when it is told to."""

    def __init__(self) -> None:
        self.pollers: list[Callable[[], bool]] = []

    def poll(self, poller: Callable[[], bool]) -> None:
        self.pollers.append(poller)

    def turn(self) -> None:
        polled, self.pollers = self.pollers, []
        self.pollers += [poller for poller in polled if not poller()]


class Inside:
    """A transport over the stand-in, and a peer: itself."""

    def __init__(self) -> None:
        self.thread = Thread()
        self.agents: list[RawAgent] = []  # alive, and named here alone
        self.num_changes = 0
        memory = HostMemory(bytearray(64), 16)
        self.transport = InsideTransport(
            TransferConfig(), "reader", memory, cast(Any, self.thread), self._changed
        )

    def _changed(self) -> None:
        self.num_changes += 1

    def connect(self) -> InsidePeer:
        return self.transport.connect(self.transport.descriptor())


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> Inside:
    nixl_library.use(monkeypatch)
    return Inside()


def raw_of(peer: InsidePeer) -> RawAgent:
    raw: RawAgent = peer._peer.agent.raw
    return raw


def test_a_broken_read_ends_with_its_agent_after_the_others(inside: Inside) -> None:
    peer = inside.connect()
    broken, healthy = peer.read((0,), (1,)), peer.read((2,), (3,))
    assert not broken.post()
    assert not healthy.post()
    raw_of(peer).reads[0].state = DisconnectError("gone")
    assert not broken.poll()
    assert inside.transport.ready, "the next agent is there before the first has ended"
    assert inside.transport.retiring
    assert not peer.usable
    with pytest.raises(AgentLostError):
        peer.read((0,), (1,)).post()
    again = inside.connect()
    inside.thread.turn()
    assert not broken.poll()
    assert not healthy.poll(), "it may finish"
    raw_of(peer).reads[1].state = "DONE"
    assert healthy.poll()
    raw_of(peer).reads.clear()
    inside.thread.turn()
    with pytest.raises(SourceLostError, match="gone") as caught:
        broken.poll()
    assert caught.value.broke_agent
    assert not inside.transport.retiring
    assert again.usable
    assert not inside.thread.pollers


def test_reads_that_do_not_finish_end_with_their_agent_soon(
    inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = inside.connect()
    copy = peer.read((0,), (1,))
    assert not copy.post()
    raw_of(peer).reads.clear()
    monkeypatch.setattr("kvtransfer.transports.inside.DRAIN_S", 0.0)
    inside.transport.rebuild()
    assert not copy.poll()
    inside.thread.turn()
    with pytest.raises(AgentLostError, match="torn down"):
        copy.poll()
    assert not inside.transport.retiring


def test_an_agent_that_cannot_be_ended_ends_no_read(
    inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = inside.connect()
    broken, unfinished = peer.read((0,), (1,)), peer.read((2,), (3,))
    assert not broken.post()
    assert not unfinished.post()
    kept = raw_of(peer)
    kept.reads[0].state = RuntimeError("unknown")
    monkeypatch.setattr("kvtransfer.transports.inside.DRAIN_S", 0.0)
    assert not broken.poll()
    inside.thread.turn()
    gc.collect()
    assert not broken.poll()
    assert not unfinished.poll()
    assert inside.transport.retiring
    assert inside.transport.undead is not None


def test_a_block_that_the_source_does_not_have_is_not_read(inside: Inside) -> None:
    peer = inside.connect()
    for block_id in (4, -1):
        with pytest.raises(TransportError, match="4 blocks"):
            peer.read((0, block_id), (1, 2))


def test_it_is_polled_once_however_often_it_is_told_to_serve(inside: Inside) -> None:
    for active in (True, False, True, True):
        inside.transport.serve(active)
    assert len(inside.thread.pollers) == 1
    inside.thread.turn()
    assert len(inside.thread.pollers) == 1
    inside.transport.serve(False)
    inside.thread.turn()
    assert not inside.thread.pollers
    inside.transport.serve(True)
    assert len(inside.thread.pollers) == 1
