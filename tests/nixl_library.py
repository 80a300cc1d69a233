"""A stand-in for nixl's library: reads end when the test says so."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from kvtransfer.agents import nixl as nixl_agent


class DisconnectError(Exception):
    """The library's own, of a source that is gone."""


class Handle:
    """Of a prepared list, or of a read; keeps its agent alive."""

    def __init__(self, agent: "RawAgent", number: int = 0) -> None:
        self.agent = agent
        self.number = number  # of a prepared list
        self.is_released = False
        self.state: str | Exception = "PROC"

    def release(self) -> None:
        self.is_released = True


class RawAgent:
    """nixl_agent."""

    def __init__(self, name: str, config: object) -> None:
        self.name = name
        self.reads: list[Handle] = []
        self.rows: list[NDArray[np.uint64]] = []  # of each list that was prepared
        self.asked: list[tuple[int, int]] = []  # of each read: numbers of the lists, from 1 on
        # of each read that was not prepared: our rows and the source's
        self.listed: list[tuple[list[list[int]], list[list[int]]]] = []
        self.known: list[str] = []  # sources: added, not removed

    def create_backend(self, name: str, options: object) -> None: ...
    def register_memory(self, regions: object, kind: str) -> None: ...

    def get_agent_metadata(self) -> bytes:
        return b"metadata"

    def add_remote_agent(self, metadata: bytes) -> bytes:
        if metadata.decode() not in self.known:
            self.known.append(metadata.decode())
        return metadata

    def remove_remote_agent(self, name: bytes) -> None:
        self.known.remove(name.decode())

    def prep_xfer_dlist(self, name: str, rows: NDArray[np.uint64], kind: str) -> Handle:
        self.rows.append(rows)
        return Handle(self, len(self.rows))

    def make_prepped_xfer(
        self, how: str, local: Handle, local_ids: object, remote: Handle, remote_ids: object
    ) -> Handle:
        self.asked.append((local.number, remote.number))
        self.reads.append(Handle(self))
        return self.reads[-1]

    def get_xfer_descs(self, rows: NDArray[np.uint64], kind: str) -> NDArray[np.uint64]:
        return rows

    def initialize_xfer(
        self, how: str, local: NDArray[np.uint64], remote: NDArray[np.uint64], name: bytes
    ) -> Handle:
        self.listed.append((local.tolist(), remote.tolist()))
        self.reads.append(Handle(self))
        return self.reads[-1]

    def transfer(self, handle: Handle) -> str:
        return "PROC"

    def check_xfer_state(self, handle: Handle) -> str:
        if isinstance(handle.state, Exception):
            raise handle.state
        return handle.state

    def get_new_notifs(self, backends: list[str]) -> None: ...


def use(monkeypatch: pytest.MonkeyPatch, agent_class: Callable[..., RawAgent] = RawAgent) -> None:
    """Have nixl agents made of this."""
    library = nixl_agent._Library(agent_class, lambda **options: options, DisconnectError)
    monkeypatch.setattr(nixl_agent, "_load", lambda *settings: library)
