"""The ucxx agent over a stand-in for the library: what is asked for, sent, and over when."""

import struct
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvtransfer.agents import ucxx as ucxx_agent
from kvtransfer.agents.base import AgentSettings, Region
from kvtransfer.agents.ucxx import UcxxAgent, UcxxPeer, runs_of
from kvtransfer.block_shares import Pieces
from kvtransfer.errors import BrokenReadError, SourceLostError, TransportError

BLOCK_BYTES, NUM_BLOCKS = 4, 8
ASK = 1 << 63


class Request:
    """Completes when the test says so."""

    def __init__(self, tag: int, buffer: Any) -> None:
        self.tag = tag
        self.buffer = buffer
        self.completed = False
        self.error: Exception | None = None

    def check_error(self) -> None:
        if self.error is not None:
            raise self.error

    def complete(self, error: Exception | None = None) -> None:
        self.completed, self.error = True, error


class Endpoint:
    def __init__(self, worker: "Worker", address: bytes) -> None:
        self.address = address
        self.alive = True
        self.closed = False
        self.received: list[Request] = []
        self.sent: list[Request] = []
        worker.endpoints.append(self)

    def tag_recv(self, buffer: Any, tag: int) -> Request:
        self.received.append(Request(tag, buffer))
        return self.received[-1]

    def tag_send(self, buffer: Any, tag: int) -> Request:
        self.sent.append(Request(tag, buffer))
        return self.sent[-1]

    def close_blocking(self) -> None:
        self.closed = True


class Worker:
    """Its address is its number."""

    epoll_file_descriptor = 0
    num = 0

    def __init__(self, context: object) -> None:
        Worker.num += 1
        self.address = b"worker %d" % Worker.num
        self.endpoints: list[Endpoint] = []
        self.arriving: list[bytes] = []

    def init_blocking_progress_mode(self) -> None: ...
    def progress(self) -> None: ...

    def tag_probe(self, tag: int, remove: bool) -> Any:
        message = self.arriving.pop(0) if self.arriving else None
        return SimpleNamespace(
            matched=message is not None, length=len(message or b""), message=message
        )

    def tag_recv_with_handle(self, buffer: Any, found: Any) -> Request:
        buffer[:] = found.message
        request = Request(ASK, buffer)
        request.complete()
        return request


API = SimpleNamespace(
    Feature=SimpleNamespace(TAG=1, WAKEUP=2),
    UCXContext=lambda options, features: options,
    UCXWorker=Worker,
    UCXXTag=int,
    UCXAddress=SimpleNamespace(create_from_buffer=bytes),
    UCXEndpoint=SimpleNamespace(create_from_worker_address=lambda w, a, handled: Endpoint(w, a)),
)


@pytest.fixture
def pool() -> NDArray[np.uint8]:
    return np.arange(BLOCK_BYTES * NUM_BLOCKS, dtype=np.uint8)


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch, pool: NDArray[np.uint8]) -> UcxxAgent:
    monkeypatch.setattr(
        ucxx_agent, "_load", lambda: ucxx_agent._Library(API, lambda buffer: buffer)
    )
    region = Region(pool.ctypes.data, BLOCK_BYTES, NUM_BLOCKS)
    return UcxxAgent(AgentSettings("worker.1", "tcp", "lo"), region)


def connected(agent: UcxxAgent) -> tuple[UcxxPeer, Endpoint]:
    peer = UcxxPeer(agent, b"source", Region(0, BLOCK_BYTES, NUM_BLOCKS))
    (endpoint,) = peer.worker.endpoints
    return peer, endpoint


def test_pieces_of_blocks_are_refused(agent: UcxxAgent) -> None:
    region = Region(0, BLOCK_BYTES, NUM_BLOCKS)
    with pytest.raises(TransportError, match="both workers need as many ranks"):
        UcxxPeer(agent, b"source", region, Pieces(1, 0, 2, 0, 1))
    assert not agent.peers


def ids(*values: int) -> NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


def ask(address: bytes, *runs: int, tag: int = 5, num_bytes: int = BLOCK_BYTES) -> bytes:
    return struct.pack("<QQH", tag, num_bytes, len(address)) + address + ids(*runs).tobytes()


def answered(agent: UcxxAgent, *asks: bytes) -> list[Endpoint]:
    """Endpoints by which the agent answered, in order of their making."""
    source: Worker = agent._worker
    source.arriving += asks
    agent.serve()
    return source.endpoints


@pytest.mark.parametrize(
    ("source", "local", "runs"),
    [
        (ids(7), ids(3), [[7, 3, 1]]),
        (ids(4, 5, 6), ids(0, 1, 2), [[4, 0, 3]]),
        (ids(6, 4, 5), ids(2, 0, 1), [[4, 0, 3]]),
        (ids(4, 5, 6), ids(0, 1, 9), [[4, 0, 2], [6, 9, 1]]),
        (ids(4, 5, 9), ids(0, 1, 2), [[4, 0, 2], [9, 2, 1]]),
        (ids(0, 1), ids(1, 0), [[0, 1, 1], [1, 0, 1]]),
    ],
)
def test_blocks_that_are_neighbours_on_both_sides_make_one_message(
    source: NDArray[np.int32], local: NDArray[np.int32], runs: list[list[int]]
) -> None:
    assert runs_of(source, local).tolist() == runs


@settings(deadline=None)
@given(st.lists(st.integers(0, 40), unique=True, min_size=1))
def test_runs_are_the_blocks_each_once(source: list[int]) -> None:
    local = np.random.default_rng(len(source)).permutation(64)[: len(source)].astype(np.int32)
    pairs = [
        (first + index, into + index)
        for first, into, num in runs_of(ids(*source), local).tolist()
        for index in range(num)
    ]
    assert sorted(pairs) == sorted(zip(source, local.tolist(), strict=True))


def test_what_a_reader_asks_for_is_what_the_source_sends_into_its_receives(
    agent: UcxxAgent, pool: NDArray[np.uint8]
) -> None:
    peer, endpoint = connected(agent)
    for source, local in ((ids(6, 2, 3), ids(1, 4, 5)), (ids(0), ids(7))):
        assert not peer.read(source, local, BLOCK_BYTES).post()
    assert [bytes(receive.buffer) for receive in endpoint.received] == [
        pool[16:24].tobytes(),
        pool[4:8].tobytes(),
        pool[28:32].tobytes(),
    ]
    (back,) = answered(agent, *(send.buffer for send in endpoint.sent))
    assert back.address == peer.worker.address
    assert [bytes(send.buffer) for send in back.sent] == [
        pool[8:16].tobytes(),
        pool[24:28].tobytes(),
        pool[0:4].tobytes(),
    ]
    assert [send.tag for send in back.sent] == [receive.tag for receive in endpoint.received]
    assert {send.tag for send in endpoint.sent} == {ASK}


def test_parts_of_blocks_are_sent_each_by_itself(agent: UcxxAgent, pool: NDArray[np.uint8]) -> None:
    peer, endpoint = connected(agent)
    assert not peer.read(ids(2, 3), ids(4, 5), 3).post()
    assert [bytes(receive.buffer) for receive in endpoint.received] == [
        pool[16:19].tobytes(),
        pool[20:23].tobytes(),
    ]
    (back,) = answered(agent, *(send.buffer for send in endpoint.sent))
    assert [bytes(send.buffer) for send in back.sent] == [
        pool[8:11].tobytes(),
        pool[12:15].tobytes(),
    ]


@pytest.mark.parametrize(
    "unsound",
    [
        b"",
        ask(b"reader", 0, 1)[:-1],
        ask(b"reader", 0, 1, 2),
        ask(b"reader", NUM_BLOCKS, 1),
        ask(b"reader", 0, 1, NUM_BLOCKS - 1, 2),
        ask(b"reader", -1, 1),
        ask(b"reader", 0, 0),
        ask(b"reader", 2, -1),
        ask(b"reader", 1, 2**31 - 1),
        ask(b"reader", 0, 1, num_bytes=0),
        ask(b"reader", 0, 1, num_bytes=BLOCK_BYTES + 1),
        ask(b"reader", 0, 1, num_bytes=2**63),
        ask(b"reader", 3, 1, 0, 2, num_bytes=3),
    ],
)
def test_only_blocks_of_the_pool_are_sent_and_the_next_reader_is_served(
    agent: UcxxAgent, unsound: bytes
) -> None:
    (back,) = answered(agent, unsound, ask(b"other", 0, 1))
    assert back.address == b"other"


def test_a_reader_whose_connection_broke_is_not_answered_over_another(agent: UcxxAgent) -> None:
    """UCX would pair that with the reader's next one."""
    (back,) = answered(agent, ask(b"reader", 0, 1))
    back.alive = False
    assert answered(agent, ask(b"reader", 0, 1)) == [back]
    assert len(back.sent) == 1


def test_a_read_is_looked_at_when_its_last_receive_is_over_however_the_others_ended(
    agent: UcxxAgent,
) -> None:
    peer, endpoint = connected(agent)
    copy = peer.read(ids(1, 3), ids(1, 3), BLOCK_BYTES)
    assert not copy.post()
    peer.close()
    first, last = endpoint.received
    endpoint.alive = False
    endpoint.sent[0].complete()
    last.complete(RuntimeError("canceled"))
    assert not copy.poll()
    assert not endpoint.closed, "a receive is still posted"
    first.complete()
    with pytest.raises(BrokenReadError, match="canceled") as caught:
        copy.poll()
    assert isinstance(caught.value.error, SourceLostError)
    assert not endpoint.closed, "only the agent's end is the end of a read that met an error"
    with pytest.raises(TransportError, match="closed"):
        peer.read(ids(1), ids(1), BLOCK_BYTES).post()


def test_nothing_is_posted_to_a_source_that_is_gone_or_has_no_such_block(agent: UcxxAgent) -> None:
    peer, endpoint = connected(agent)
    with pytest.raises(TransportError, match="no such block"):
        peer.read(ids(NUM_BLOCKS), ids(0), BLOCK_BYTES).post()
    endpoint.alive = False
    with pytest.raises(SourceLostError):
        peer.read(ids(0), ids(0), BLOCK_BYTES).post()
    assert not endpoint.received
    peer.close()
    assert endpoint.closed
    assert not agent.peers
