"""A transport library's agent, as the process that runs it sees it (``agents.main``).

An agent has the worker's pool of blocks at hand, reads blocks of its peers' pools into
it, and lets its peers read its own. Everything of it is called on one thread. Light
imports: such a process starts at once.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvtransfer.block_shares import Pieces
from kvtransfer.errors import TransportError


class AgentSettings(NamedTuple):
    """What an agent is made with."""

    name: str  # of this life of it, never used again
    ucx_tls: str  # empty: it does without UCX
    ucx_net_devices: str


class Region(NamedTuple):
    """A pool of blocks at the addresses of the process that registered it."""

    base_address: int
    block_bytes: int
    num_blocks: int
    memory_kind: str = "DRAM"
    device_id: int = 0

    def check_blocks(self, block_ids: Collection[int]) -> None:
        """Raise TransportError unless the pool has all of them."""
        if max(block_ids) >= self.num_blocks or min(block_ids) < 0:
            raise TransportError(
                f"block {max(block_ids)} was announced, the source has {self.num_blocks} blocks"
            )

    def rows(self, num_bytes: int) -> NDArray[np.uint64]:
        """Descriptors of all blocks' first bytes: [num_blocks, 3] of (address, bytes, device)."""
        return self._rows(np.arange(self.num_blocks, dtype=np.uint64), num_bytes, [0])

    def piece_rows(
        self, block_ids: NDArray[np.int32], num_bytes: int, offsets: Sequence[int]
    ) -> NDArray[np.uint64]:
        """Those of pieces of these blocks, which begin at ``offsets``: [n * num_offsets, 3]."""
        return self._rows(block_ids.astype(np.uint64), num_bytes, offsets)

    def _rows(
        self, block_ids: NDArray[np.uint64], num_bytes: int, offsets: Sequence[int]
    ) -> NDArray[np.uint64]:
        rows = np.empty((len(block_ids) * len(offsets), 3), dtype=np.uint64)
        begins = np.uint64(self.base_address) + block_ids * np.uint64(self.block_bytes)
        rows[:, 0] = (begins[:, None] + np.array(offsets, dtype=np.uint64)).reshape(-1)
        rows[:, 1] = num_bytes
        rows[:, 2] = self.device_id
        return rows


class AgentCopy(Protocol):
    """One read. Over once ``post`` or ``poll`` returned True.

    Both raise BrokenReadError where it had begun: it is not over and will not be, and is
    to be kept, but not polled, until its agent has ended.
    """

    def post(self) -> bool:
        """Begin; True if that was all: the bytes did not go over a network.

        Raises TransportError: nothing has begun.
        """
        ...

    def poll(self) -> bool: ...


class AgentPeer(Protocol):
    """One source's pool. Useless once its agent has ended."""

    def read(
        self,
        source_block_ids: NDArray[np.int32],
        local_block_ids: NDArray[np.int32],
        num_bytes: int,
    ) -> AgentCopy:
        """A read to post, of the first bytes of each block, or pieces. Block ids: [n] each.

        num_bytes: of each block, that are read.
        """
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
    # of an agent, from a source's metadata; pieces: of all its reads
    peer: Callable[[Any, bytes, Region, Pieces | None], AgentPeer]
