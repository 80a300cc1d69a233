"""Agents of several ranks are one transport: a read is over when nothing of it can write."""

from typing import Any, cast

import pytest

from diptych.v1 import kv_source_pb2
from kvtransfer.block_shares import Pieces
from kvtransfer.errors import AgentLostError, AgentTakenError, TransportError, UndeadAgentError
from kvtransfer.transports.rank_transports import RankCopy, RankPeer, RankTransports

BLOCK_BYTES, STRETCH = 512, 128


class PartCopy:
    """Ends when it is told to."""

    wakes = True

    def __init__(self) -> None:
        self.state: bool | Exception = False

    def post(self) -> bool:
        return self.poll()

    def poll(self) -> bool:
        if isinstance(self.state, Exception):
            raise self.state
        return self.state


class PartPeer:
    def __init__(self, *connected: object) -> None:
        self.connected = connected
        self.usable = True
        self.reads: list[tuple[object, ...]] = []
        self.is_closed = self.is_checked = False

    def read(self, *asked: object) -> PartCopy:
        self.reads.append(asked)
        return PartCopy()

    def check_lane(self) -> None:
        self.is_checked = True

    def close(self) -> None:
        self.is_closed = True


class Part:
    """One rank's transport."""

    name = "nixl"
    undead: UndeadAgentError | None = None

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.ready, self.retiring, self.problem = True, False, ""
        self.calls: list[object] = []
        self.peers: list[PartPeer] = []

    def descriptor(self) -> kv_source_pb2.MemoryDescriptor:
        return described(self.rank)

    def connect(
        self,
        descriptor: kv_source_pb2.MemoryDescriptor,
        block_bytes: int | None = None,
        pieces: Pieces | None = None,
    ) -> PartPeer:
        if descriptor.agent_metadata == b"bad":
            raise TransportError("damaged")
        self.peers.append(PartPeer(descriptor.agent_metadata, block_bytes, pieces))
        return self.peers[-1]

    def serve(self, active: bool) -> None:
        self.calls.append(active)

    def rebuild(self) -> None:
        self.calls.append("rebuild")

    def close(self) -> None:
        self.calls.append("close")


def described(rank: int) -> kv_source_pb2.MemoryDescriptor:
    name = str(rank).encode()
    return kv_source_pb2.MemoryDescriptor(agent_metadata=name, digest=b"of " + name)


def ranks(num: int) -> tuple[RankTransports, list[Part]]:
    parts = [Part(rank) for rank in range(num)]
    return RankTransports(cast(Any, parts), BLOCK_BYTES, STRETCH), parts


def source(num: int) -> kv_source_pb2.MemoryDescriptor:
    return ranks(num)[0].descriptor()


def test_one_rank_is_described_and_read_as_itself() -> None:
    transport, (part,) = ranks(1)
    assert transport.descriptor() == described(0)
    assert transport.connect(source(1)) is cast(Any, part.peers[0])
    assert part.peers[0].connected == (b"0", None, None)


def test_none_connects_while_the_agent_of_one_is_being_rebuilt() -> None:
    transport, parts = ranks(2)
    parts[1].ready = False
    with pytest.raises(AgentLostError, match="is being rebuilt"):
        transport.connect(source(2))
    assert not any(part.peers for part in parts)
    parts[1].ready = True
    transport.connect(source(2))
    assert all(part.peers for part in parts)


def test_several_are_described_in_their_order() -> None:
    descriptor = source(2)
    assert list(descriptor.ranks) == [described(0), described(1)]
    assert not descriptor.agent_metadata


def test_equal_ranks_read_each_other() -> None:
    transport, parts = ranks(2)
    peer = transport.connect(source(2))
    assert [part.peers[0].connected for part in parts] == [
        (b"0", BLOCK_BYTES // 2, None),
        (b"1", BLOCK_BYTES // 2, None),
    ]
    peer.read((1,), (2,), 3 * STRETCH)
    peer.read((1,), (2,))
    for part in parts:
        assert part.peers[0].reads == [((1,), (2,), 3 * STRETCH // 2), ((1,), (2,), 256)]


def test_two_read_halves_of_one() -> None:
    transport, parts = ranks(2)
    peer = transport.connect(source(1))
    peer.read((1,), (2,), STRETCH)
    for rank, part in enumerate(parts):
        assert part.peers[0].connected == (b"0", BLOCK_BYTES, Pieces(64, 64 * rank, 128, 0, 64))
        assert part.peers[0].reads == [((1,), (2,), 64)]


def test_one_reads_of_both_of_two() -> None:
    transport, (part,) = ranks(1)
    transport.connect(source(2))
    assert [peer.connected for peer in part.peers] == [
        (b"0", BLOCK_BYTES // 2, Pieces(64, 0, 64, 0, 128)),
        (b"1", BLOCK_BYTES // 2, Pieces(64, 0, 64, 64, 128)),
    ]


def test_what_one_rank_is_all_are() -> None:
    transport, parts = ranks(2)
    peer = transport.connect(source(2))
    assert isinstance(peer, RankPeer)
    assert peer.usable
    peer.check_lane()
    parts[1].peers[0].usable = False
    assert not peer.usable
    peer.close()
    assert all(part.peers[0].is_closed and part.peers[0].is_checked for part in parts)
    assert (transport.ready, transport.retiring, transport.problem) == (True, False, "")
    assert transport.undead is None
    parts[1].ready, parts[1].retiring, parts[1].problem = False, True, "no nixl"
    parts[1].undead = UndeadAgentError("still there")
    assert (transport.ready, transport.retiring, transport.problem) == (False, True, "no nixl")
    assert transport.undead is parts[1].undead
    transport.serve(True)
    transport.rebuild()
    transport.close()
    assert all(part.calls == [True, "rebuild", "close"] for part in parts)
    with pytest.raises(TransportError, match="sent bytes"):
        peer.write((1,), 0, b"x")


def test_a_rank_that_cannot_be_connected_leaves_no_other_connected() -> None:
    transport, parts = ranks(2)
    descriptor = source(2)
    descriptor.ranks[1].agent_metadata = b"bad"
    with pytest.raises(TransportError, match="damaged"):
        transport.connect(descriptor)
    assert parts[0].peers[0].is_closed


def test_ranks_that_changed_places_are_noticed() -> None:
    transport, parts = ranks(2)
    descriptor = source(2)
    descriptor.ranks.reverse()
    with pytest.raises(TransportError, match="were damaged on their way"):
        transport.connect(descriptor)
    assert not any(part.peers for part in parts)


def test_ranks_that_share_no_whole_heads_are_refused() -> None:
    transport, parts = ranks(2)
    with pytest.raises(TransportError, match="128 bytes of heads cannot be shared by 3 ranks"):
        transport.connect(source(3))
    assert not any(part.peers for part in parts)


def test_a_read_ends_when_that_of_every_rank_has() -> None:
    parts = [PartCopy(), PartCopy()]
    copy = RankCopy(parts)
    assert copy.wakes
    assert not copy.post()
    parts[1].state = True
    assert not copy.poll()
    parts[0].state = True
    assert copy.poll()


@pytest.mark.parametrize("other", [True, RuntimeError("as well")])
def test_a_read_that_fails_in_one_rank_fails_when_the_others_have_ended(
    other: bool | Exception,
) -> None:
    """Until then they write into the block."""
    parts = [PartCopy(), PartCopy()]
    parts[1].state = AgentLostError("gone")
    copy = RankCopy(parts)
    assert not copy.post(), "the other one was posted"
    assert not copy.poll()
    parts[0].state = other
    with pytest.raises(AgentLostError, match="gone"):
        copy.poll()


@pytest.mark.parametrize("why", [AgentTakenError("took it"), TransportError("broke it")])
@pytest.mark.parametrize("place", [0, 1])
def test_a_rank_of_the_source_that_ended_our_agent_is_to_blame_in_whichever_order_they_come(
    place: int, why: TransportError
) -> None:
    """The others were read over the same agent, and only know that it is gone."""
    parts = [PartCopy(), PartCopy()]
    copy = RankCopy(parts)
    assert not copy.post()
    parts[place].state, parts[1 - place].state = why, AgentLostError("gone")
    with pytest.raises(type(why), match=str(why)):
        copy.poll()
