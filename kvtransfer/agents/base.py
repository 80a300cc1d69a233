"""A transport library's agent, as the process that runs it sees it (``agent_main``).

An agent has the worker's pool of blocks at hand, reads blocks of its peers' pools into
it, and lets its peers read its own. Everything of it is called on one thread. Light
imports: such a process starts at once.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class AgentSettings(NamedTuple):
    """What an agent is made with."""

    name: str  # of this life of it, never used again
    ucx_tls: str
    ucx_net_devices: str


class Region(NamedTuple):
    """A pool of blocks at the addresses of the process that registered it."""

    base_address: int
    block_bytes: int
    num_blocks: int
    memory_kind: str = "DRAM"
    device_id: int = 0

    def rows(self) -> NDArray[np.uint64]:
        """Descriptors of all blocks: [num_blocks, 3] of (address, bytes, device)."""
        rows = np.empty((self.num_blocks, 3), dtype=np.uint64)
        offsets = np.arange(self.num_blocks, dtype=np.uint64) * np.uint64(self.block_bytes)
        rows[:, 0] = np.uint64(self.base_address) + offsets
        rows[:, 1] = self.block_bytes
        rows[:, 2] = self.device_id
        return rows


class AgentCopy(Protocol):
    """One read. Terminal once ``post`` or ``poll`` returned True or raised TransportError."""

    def post(self) -> bool:
        """Begin; True if that was all: the bytes did not go over a network."""
        ...

    def poll(self) -> bool: ...


class AgentPeer(Protocol):
    """One source's pool. Useless once its agent has ended."""

    def read(
        self, source_block_ids: NDArray[np.int32], local_block_ids: NDArray[np.int32]
    ) -> AgentCopy:
        """A read to post. Block ids: [n] each."""
        ...

    def close(self) -> None:
        """Forget the peer, once its last copy has ended."""
        ...


class Agent(Protocol):
    """One life of an agent."""

    metadata: bytes  # what a peer needs to reach it

    @property
    def files(self) -> list[int]:
        """They wake whoever sleeps; none where the library has to be polled."""
        ...

    def serve(self) -> None:
        """Progress what peers do. Raises TransportError, of one peer: the others go on."""
        ...

    def sleep_s(self, active: bool, pause_s: float) -> float | None:
        """How long the process may sleep now; None: until it is woken.

        ``active``: a read is under way, or peers may be reading. ``pause_s``: the next
        one between polls, if it has to poll.
        """
        ...


class Library(NamedTuple):
    """How to make an agent of one kind, and its peers. Both raise TransportError."""

    agent: Callable[[AgentSettings, Region], Agent]
    peer: Callable[[Any, bytes, Region], AgentPeer]  # of an agent, from a source's metadata
