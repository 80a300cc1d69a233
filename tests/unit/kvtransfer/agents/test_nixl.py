"""What a nixl agent says of its reads, and what is left after its teardown, over a stand-in."""

import gc
import os
import weakref

import numpy as np
import pytest
from numpy.typing import NDArray

from kvtransfer.agents import nixl
from kvtransfer.agents.base import AgentSettings, Region
from kvtransfer.agents.nixl import NixlAgent
from kvtransfer.agents.nixl_reads import NixlCopy, NixlPeer
from kvtransfer.block_shares import Pieces
from kvtransfer.errors import (
    AgentLostError,
    BrokenReadError,
    SourceLostError,
    TransportError,
    UndeadAgentError,
)
from tests import nixl_library
from tests.nixl_library import DisconnectError, Handle

REGION = Region(base_address=4096, block_bytes=16, num_blocks=4)


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> NixlAgent:
    nixl_library.use(monkeypatch)
    return NixlAgent(AgentSettings("reader.1", "cma", "lo"), REGION)


def ids(*values: int) -> NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


def posted(agent: NixlAgent, peer: NixlPeer, block_id: int = 0) -> tuple[NixlCopy, Handle]:
    copy = NixlCopy(peer, ids(block_id), ids(block_id), 16)
    assert not copy.post()
    return copy, agent.raw.reads[-1]


def test_reads_over_cuda_ipc_are_not_left_to_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """As UCX has it by default where no NVLink is; who sets it otherwise has it so."""
    monkeypatch.setattr(os, "environ", {})
    settings = AgentSettings("reader.1", "cma,tcp,cuda_copy,cuda_ipc", "lo")
    nixl.tell_ucx(settings)
    assert os.environ["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] == "on"
    assert os.environ["UCX_TLS"] == settings.ucx_tls
    os.environ["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] = "off"
    nixl.tell_ucx(settings)
    assert os.environ["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] == "off"


@pytest.mark.parametrize(
    ("ucx_tls", "is_told"),
    [("cma,tcp", True), ("cma,tcp,cuda_copy", False), ("all", False), ("rc,cuda", False)],
)
def test_an_agent_that_cannot_start_says_with_what_and_what_a_gpu_wants(
    ucx_tls: str, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As nixl itself says it in its log alone."""

    def refused(name: str, config: object) -> nixl_library.RawAgent:
        raise DisconnectError("NIXL_ERR_BACKEND")

    nixl_library.use(monkeypatch, refused)
    with pytest.raises(TransportError) as found:
        NixlAgent(AgentSettings("reader.1", ucx_tls, "eth0"), REGION)
    message = str(found.value)
    assert message.startswith("nixl cannot start: DisconnectError: NIXL_ERR_BACKEND (UCX_TLS=")
    assert f"(UCX_TLS={ucx_tls}, UCX_NET_DEVICES=eth0; " in message
    assert ("it needs cuda_copy in ucx_tls" in message) is is_told


def test_an_error_somebody_keeps_does_not_keep_the_agent(
    agent: NixlAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = NixlPeer(agent, b"source.1", REGION)
    failing, unfinished = posted(agent, peer)[0], posted(agent, peer, 1)[0]
    agent.raw.reads[0].state = DisconnectError("gone")
    with pytest.raises(BrokenReadError, match="gone") as caught:
        failing.poll()

    raw = weakref.ref(agent.raw)
    gc.disable()
    try:
        monkeypatch.setattr(gc, "collect", lambda: 0)
        agent.raw.reads.clear()  # the library's own record of them
        agent.close()
        assert raw() is None, "unfinished reads go on as long as the agent lives"
    finally:
        gc.enable()
    assert isinstance(caught.value.error, SourceLostError)
    assert isinstance(caught.value.__cause__, DisconnectError)
    with pytest.raises(AgentLostError, match="torn down"):
        unfinished.poll()


@pytest.mark.parametrize("state", [RuntimeError("unknown; the read itself goes on"), "ERR"])
def test_an_error_of_the_library_is_no_end_of_a_read(
    agent: NixlAgent, state: str | Exception
) -> None:
    peer = NixlPeer(agent, b"source.1", REGION)
    copy, handle = posted(agent, peer)
    handle.state = state
    with pytest.raises(BrokenReadError):
        copy.poll()
    assert not handle.is_released
    assert agent.num_reads == 0, "nobody can wait for it"
    peer.close()
    assert agent.raw.known == ["source.1"], "the read may still be under way"


def test_parts_of_blocks_are_prepared_once_for_each_size(agent: NixlAgent) -> None:
    peer = NixlPeer(agent, b"source.1", REGION)
    whole = [16, 16]  # bytes of each block, of our list and of the peer's
    assert [rows[0, 1] for rows in agent.raw.rows] == whole
    for num_bytes in (12, 16, 12):
        copy = peer.read(ids(2, 1), ids(0, 3), num_bytes)
        assert not copy.post()
        agent.raw.reads[-1].state = "DONE"
        assert copy.poll()
    assert [rows[0, 1] for rows in agent.raw.rows] == [*whole, 12, 12]
    assert agent.raw.rows[-1][:, 0].tolist() == [4096, 4112, 4128, 4144]
    assert agent.raw.asked == [(3, 4), (1, 2), (3, 4)]
    lists = [peer.blocks(16), peer.blocks(12)]
    peer.close()
    assert all(prepared.is_released for prepared in lists)


def test_pieces_of_blocks_are_listed_for_each_read(agent: NixlAgent) -> None:
    """Those that lie within the bytes that are read of each block."""
    pieces = Pieces(4, source_begin=2, source_stride=8, local_begin=1, local_stride=5)
    source = Region(base_address=1000, block_bytes=32, num_blocks=4)
    peer = NixlPeer(agent, b"source.1", source, pieces)
    assert not peer.read(ids(3, 1), ids(0, 2), 8).post()
    ((ours, theirs),) = agent.raw.listed
    assert theirs == [[1034, 4, 0], [1042, 4, 0], [1098, 4, 0], [1106, 4, 0]]  # block 1, block 3
    assert ours == [[4129, 4, 0], [4134, 4, 0], [4097, 4, 0], [4102, 4, 0]]
    agent.raw.reads[-1].state = "DONE"
    peer.close()
    assert agent.raw.known == ["source.1"], "the read is under way"


def test_an_agent_that_outlives_its_teardown_ends_no_read(agent: NixlAgent) -> None:
    copy, _ = posted(agent, NixlPeer(agent, b"source.1", REGION))
    kept = agent.raw  # by a frame of the library, a log record, a debugger
    with pytest.raises(UndeadAgentError):
        agent.close()
    assert not copy.poll()
    assert not agent.is_gone
    assert kept is not None


def test_a_name_is_forgotten_with_the_last_peer_that_has_it(agent: NixlAgent) -> None:
    """A pair that was lost with a read under way, and is proven again meanwhile."""
    lost = NixlPeer(agent, b"source.1", REGION)
    copy, handle = posted(agent, lost)
    lost.close()
    again = NixlPeer(agent, b"source.1", REGION)
    other = NixlPeer(agent, b"source.2", REGION)
    handle.state = "DONE"
    assert copy.poll()
    assert agent.raw.known == ["source.1", "source.2"]
    posted(agent, again)
    other.close()
    assert agent.raw.known == ["source.1"]
    agent.raw.reads[-1].state = "DONE"
    assert posted(agent, again)[0]
