"""What is left of a nixl agent after its teardown, over a stand-in for the library."""

import gc
import weakref

import numpy as np
import pytest

from kvtransfer.agents import nixl as nixl_agent
from kvtransfer.agents.base import AgentSettings, Region
from kvtransfer.agents.nixl import NixlAgent
from kvtransfer.agents.nixl_reads import NixlCopy, NixlPeer
from kvtransfer.transports.base import SourceLostError, TransportError


class DisconnectError(Exception):
    pass


class Handle:
    def __init__(self, agent: "RawAgent") -> None:
        self.agent = agent

    def release(self) -> None: ...


class RawAgent:
    """Reads stay in progress; asking for the state of the first one raises."""

    def __init__(self, name: str, config: object) -> None:
        self.num_reads = 0

    def create_backend(self, name: str, options: object) -> None: ...
    def register_memory(self, regions: object, kind: str) -> None: ...
    def remove_remote_agent(self, name: str) -> None: ...

    def get_agent_metadata(self) -> bytes:
        return b"metadata"

    def add_remote_agent(self, metadata: bytes) -> str:
        return "peer"

    def prep_xfer_dlist(self, name: str, rows: object, kind: str) -> Handle:
        return Handle(self)

    def make_prepped_xfer(self, *arguments: object) -> Handle:
        return Handle(self)

    def transfer(self, handle: Handle) -> str:
        return "PROC"

    def check_xfer_state(self, handle: Handle) -> str:
        raise DisconnectError("gone")


def agent_config(**options: object) -> object:
    return options


def test_an_error_somebody_keeps_does_not_keep_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    library = nixl_agent._Library(RawAgent, agent_config, DisconnectError)
    monkeypatch.setattr(nixl_agent, "_load", lambda *settings: library)
    region = Region(base_address=4096, block_bytes=16, num_blocks=4)
    agent = NixlAgent(AgentSettings("reader.1", "cma", "lo"), region)
    peer = NixlPeer(agent, b"metadata", region)
    first, second = np.array([0], dtype=np.int32), np.array([1], dtype=np.int32)
    failing, unfinished = NixlCopy(peer, first, first), NixlCopy(peer, second, second)
    assert not failing.post()
    assert not unfinished.post()
    with pytest.raises(SourceLostError, match="gone") as caught:
        failing.poll()

    raw = weakref.ref(agent.raw)
    gc.disable()
    try:
        monkeypatch.setattr(gc, "collect", lambda: 0)
        agent.close()
        assert raw() is None, "unfinished reads go on as long as the agent lives"
    finally:
        gc.enable()
    assert isinstance(caught.value.__cause__, DisconnectError)
    with pytest.raises(TransportError, match="torn down"):
        unfinished.poll()
