"""An agent's process: what one peer does wrong, or one read, costs that one alone."""

import os
import resource
import socket
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from kvtransfer.agents import main
from kvtransfer.agents.base import Agent, AgentSettings, Library, Region
from kvtransfer.agents.main import POLL_MAX_S, POLL_MIN_S, SERVE_MAX_S, AgentLoop, ready_files
from kvtransfer.agents.wire import (
    Channel,
    Kind,
    Message,
    PeerCommand,
    ReadCommand,
    unpack_error,
)
from kvtransfer.block_shares import Pieces
from kvtransfer.errors import BrokenReadError, SourceLostError, TransportError

REGION = Region(base_address=4096, block_bytes=16, num_blocks=4)
NUM_BYTES = 12  # of each block, that are read
MANY = 40  # looks
PIECES = Pieces(4, source_begin=1, source_stride=8, local_begin=2, local_stride=9)


class Copy:
    """A read that goes as its peer's metadata says."""

    def __init__(self, how: bytes) -> None:
        self.how = how

    def post(self) -> bool:
        match self.how:
            case b"at once":
                return True
            case b"never begun":
                raise TransportError("not so")
            case b"broken at once":
                raise BrokenReadError(SourceLostError("gone"))
        return False

    def poll(self) -> bool:
        if self.how == b"broken":
            raise BrokenReadError(SourceLostError("gone"))
        return self.how == b"later"


class Peer:
    def __init__(
        self, agent: object, metadata: bytes, region: Region, pieces: Pieces | None
    ) -> None:
        assert (region, pieces) == (REGION, PIECES)
        if metadata == b"too much":
            raise MemoryError("rows")
        self.how = metadata

    def read(self, source: NDArray[np.int32], local: NDArray[np.int32], num_bytes: int) -> Copy:
        assert num_bytes == NUM_BYTES
        return Copy(self.how)

    def close(self) -> None: ...


class IdleAgent:
    metadata = b""
    files: tuple[int, ...] = ()

    def serve(self) -> None: ...

    def sleep_s(self, active: bool, pause_s: float) -> float | None:
        return 0.0


class Process:
    """The loop over a socket pair, in steps."""

    def __init__(self, ours: Channel, theirs: Channel) -> None:
        self.channel = ours
        library = Library(lambda settings, region: cast(Agent, IdleAgent()), cast(Any, Peer))
        agent = library.agent(AgentSettings("worker.1", "tcp", "lo"), REGION)
        self.loop = AgentLoop(library, agent, theirs)

    def told(self, *messages: Message) -> list[Message]:
        """Say these, let it work for a while, hear what it says."""
        for message in messages:
            self.loop._obey(message)
        for _ in range(3):
            self.loop._progress()
        return self.channel.receive()

    def connect(self, peer_id: int, metadata: bytes) -> None:
        self.connects(peer_id, PeerCommand(REGION, metadata, PIECES).packed())

    def connects(self, peer_id: int, payload: bytes) -> None:
        """It says when it is at that peer, and when no more; of what came of it, nothing."""
        said = self.told(Message(Kind.CONNECT, peer_id, payload))
        assert said == [Message(Kind.CONNECTING, peer_id), Message(Kind.CONNECTING)]

    def read(self, peer_id: int, read_id: int = 7) -> Message:
        block_id = np.array([1], dtype=np.int32)
        command = ReadCommand(peer_id, NUM_BYTES, block_id, block_id)
        (answer,) = self.told(Message(Kind.READ, read_id, command.packed()))
        assert answer.id == read_id
        return answer


@pytest.fixture
def process() -> Iterator[Process]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Process(Channel(ours), Channel(theirs))


class PolledAgent(IdleAgent):
    """As nixl's: nothing wakes it."""

    def __init__(self) -> None:
        self.pauses_s: list[float | None] = []

    def sleep_s(self, active: bool, pause_s: float) -> float | None:
        self.pauses_s.append(pause_s if active else None)
        if len(self.pauses_s) > MANY:
            raise EOFError
        return 0.0


def pauses_s(*messages: Message) -> list[float | None]:
    """Between its looks, once it was told these."""
    ours, theirs = socket.socketpair()
    agent = PolledAgent()
    library = Library(lambda settings, region: cast(Agent, agent), cast(Any, Peer))
    with ours, theirs:
        channel = Channel(ours)
        for message in messages:
            channel.send(message)
        with pytest.raises(EOFError):
            AgentLoop(library, cast(Agent, agent), Channel(theirs)).run()
    return agent.pauses_s


def test_it_looks_often_for_its_own_reads_and_seldom_for_those_of_peers() -> None:
    """One that is read from is polled for as long as any fetch is open, on the prompts' core."""
    assert set(pauses_s()) == {None}
    served = pauses_s(Message(Kind.SERVE, 1))[1:]
    assert served[:3] == [POLL_MIN_S, 2 * POLL_MIN_S, 4 * POLL_MIN_S]
    assert served[-1] == SERVE_MAX_S
    connect = Message(Kind.CONNECT, 1, PeerCommand(REGION, b"never", PIECES).packed())
    block_id = np.array([1], dtype=np.int32)
    read = Message(Kind.READ, 7, ReadCommand(1, NUM_BYTES, block_id, block_id).packed())
    assert pauses_s(Message(Kind.SERVE, 1), connect, read)[-1] == POLL_MAX_S


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        (b"at once", Kind.DONE, ""),
        (b"later", Kind.DONE, ""),
        (b"never begun", Kind.FAILED, "not so"),
        (b"broken at once", Kind.BROKEN, "gone"),
        (b"broken", Kind.BROKEN, "gone"),
        (b"too much", Kind.FAILED, "MemoryError: rows"),
    ],
)
def test_it_says_how_a_read_goes(process: Process, how: bytes, kind: Kind, message: str) -> None:
    process.connect(1, how)
    answer = process.read(1)
    assert answer.kind is kind
    if message:
        assert message in str(unpack_error(answer.payload))


def test_a_peer_that_cannot_be_understood_fails_alone(process: Process) -> None:
    process.connect(1, b"later")
    bad = PeerCommand(REGION, b"").packed().replace(b"DRAM", "DRAé".encode()[:4])
    for payload in (bad, b"", b"x"):
        process.connects(2, payload)
        assert process.read(2).kind is Kind.FAILED
    assert process.read(1).kind is Kind.DONE
    assert process.read(3).kind is Kind.FAILED  # nobody ever named it


def test_peers_beyond_the_most_are_not_known(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "MAX_PEERS", 2)
    for peer_id in (1, 2, 3):
        process.connect(peer_id, b"later")
    assert process.read(2).kind is Kind.DONE
    answer = process.read(3)
    assert answer.kind is Kind.FAILED
    assert "2 others" in str(unpack_error(answer.payload))
    process.told(Message(Kind.DISCONNECT, 1))
    process.connect(4, b"later")
    assert process.read(4).kind is Kind.DONE


def test_files_of_any_number_are_waited_for() -> None:
    """ucxx has one for each peer; ``select`` ends at 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    number = 1500
    if hard != resource.RLIM_INFINITY and hard <= number:
        pytest.skip(f"this machine allows {hard} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, number + 1), hard))
    ours, theirs = socket.socketpair()
    try:
        with ours, theirs:
            os.dup2(theirs.fileno(), number)
            try:
                assert ready_files([number], [], 0.0) == set()
                ours.send(b"x")
                assert ready_files([number], [], None) == {number}
                assert ready_files([number], [], 1e-4) == {number}
                assert ready_files([], [number], 0.002) == {number}
            finally:
                os.close(number)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
