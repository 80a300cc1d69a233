"""A source's pool as a nixl agent reaches it, and the reads made of it.

On the agent's thread, like all of it; light imports, for the agent's own process.
A handle released while a read is under way does not stop it, so unfinished copies
are polled to their end.
"""

import logging
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtransfer.agents.base import Region
from kvtransfer.agents.nixl import NixlAgent, describe
from kvtransfer.block_shares import Pieces
from kvtransfer.errors import AgentLostError, BrokenReadError, TransportError

logger = logging.getLogger(__name__)


class NixlPeer:
    """One source's pool, as prepared descriptors. Useless once its agent is closed."""

    def __init__(
        self, agent: NixlAgent, metadata: bytes, region: Region, pieces: Pieces | None = None
    ) -> None:
        """Hand the source's metadata to the library. Raises TransportError."""
        self.agent = agent
        self._pieces = pieces
        self.num_live_copies = 0
        self._closing = False
        self._region = region
        self._blocks: dict[int, Any] = {}  # prepared, by their bytes; empty once dropped
        try:
            self._name = agent.add_peer(metadata)
            try:
                self.blocks(region.block_bytes)
            except Exception:
                agent.remove_peer(self._name)
                raise
        except Exception as error:
            raise agent.translated(error) from error
        agent.dependents.add(self)

    @property
    def usable(self) -> bool:
        return not self._closing and self.agent.raw is not None and bool(self._blocks)

    def blocks(self, num_bytes: int) -> Any:
        """Its blocks' first bytes, prepared once for each number. Raises what the library does."""
        prepared = self._blocks.get(num_bytes)
        if prepared is None:
            prepared = self.agent.prepared(self._name, self._region, num_bytes)
            self._blocks[num_bytes] = prepared
        return prepared

    def read(
        self,
        source_block_ids: NDArray[np.int32],
        local_block_ids: NDArray[np.int32],
        num_bytes: int,
    ) -> "NixlCopy":
        return NixlCopy(self, source_block_ids, local_block_ids, num_bytes)

    def new_read(
        self,
        source_block_ids: NDArray[np.int32],
        local_block_ids: NDArray[np.int32],
        num_bytes: int,
    ) -> Any:
        """Its handle, as ``read`` says it, not begun. Raises what the library does."""
        agent, pieces = self.agent, self._pieces
        if pieces is None:
            return agent.raw.make_prepped_xfer(
                "READ",
                agent.local_blocks(num_bytes),
                local_block_ids,
                self.blocks(num_bytes),
                source_block_ids,
            )
        num_pieces = num_bytes // pieces.num_bytes
        return agent.piece_read(
            self._name, self._region, pieces, source_block_ids, local_block_ids, num_pieces
        )

    def close(self) -> None:
        self._closing = True
        self.close_if_idle()

    def close_if_idle(self) -> None:
        """Once closing, forget the peer when its last copy has ended: reads under way need it."""
        if not self._closing or self.num_live_copies or not self._blocks:
            return
        try:
            self.agent.remove_peer(self._name)
        except Exception as error:  # noqa: BLE001 - a dead peer's entry may be gone already
            logger.debug("nixl peer", extra={"error": describe(error)})
        self.drop_handles()

    def drop_handles(self) -> None:
        """Also called while the agent is being destroyed."""
        blocks, self._blocks = self._blocks, {}
        self._closing = True
        for prepared in blocks.values():
            _release(prepared)
        self.agent.dependents.discard(self)


class NixlCopy:
    """One READ. Its handle is released only when the library says that it is done.

    An error of the library is no such word: the read may go on beneath it.
    """

    def __init__(
        self,
        peer: NixlPeer,
        source_block_ids: NDArray[np.int32],
        local_block_ids: NDArray[np.int32],
        num_bytes: int,
    ) -> None:
        self._peer = peer
        self._num_bytes = num_bytes  # of each block
        self._handle: Any = None
        order = np.argsort(source_block_ids, kind="stable")  # neighbours merge into one descriptor
        self._source_block_ids = source_block_ids[order]
        self._local_block_ids = local_block_ids[order]

    def post(self) -> bool:
        """Begin; True if that was all: the bytes did not go over a network.

        Raises TransportError: nothing has begun. BrokenReadError.
        """
        peer, agent = self._peer, self._peer.agent
        if not peer.usable:
            raise TransportError("the connection to the source was closed")
        try:
            self._handle = peer.new_read(
                self._source_block_ids, self._local_block_ids, self._num_bytes
            )
        except Exception as error:
            raise agent.translated(error) from error
        agent.dependents.add(self)
        peer.num_live_copies += 1
        agent.num_reads += 1
        return self._advance("transfer")

    def poll(self) -> bool:
        """Whether it is done. Raises BrokenReadError; AgentLostError: the agent is gone."""
        if self._handle is None:
            if not self._peer.agent.is_gone:
                return False
            raise AgentLostError("the transport agent was torn down")
        return self._advance("check_xfer_state")

    def drop_handles(self) -> None:
        """The read is done, or its agent is being destroyed."""
        handle, self._handle = self._handle, None
        _release(handle)
        self._peer.agent.dependents.discard(self)
        self._peer.num_live_copies -= 1
        self._peer.close_if_idle()

    def _advance(self, step: str) -> bool:
        """Call the agent's ``step``; True when the read is done. Raises BrokenReadError.

        No local variable names the agent: an error would keep it alive.
        """
        try:
            state = getattr(self._peer.agent.raw, step)(self._handle)
        except Exception as error:
            self._peer.agent.num_reads -= 1
            raise BrokenReadError(self._peer.agent.translated(error)) from error
        if state == "PROC":
            return False
        self._peer.agent.num_reads -= 1
        if state != "DONE":
            raise BrokenReadError(TransportError(f"nixl: the read ended as {state}"))
        self.drop_handles()
        return True


def _release(handle: Any) -> None:
    try:
        handle.release()
    except Exception as error:  # noqa: BLE001 - it ended, or its agent is about to
        logger.debug("nixl release", extra={"error": describe(error)})
