"""The nixl transport: one-sided reads of a source's registered pool, over UCX.

Here its agent lives inside the worker: for pools in GPU memory, which no child
process maps; ``child_transport`` is the usual form. Transfer thread only.

Facts that shape both: see ``agent_identity``.
"""

import logging
from collections.abc import Callable
from typing import NoReturn

import numpy as np

from diptych.v1 import kv_source_pb2
from kvtransfer.agents.identity import AgentIdentity, verified_region
from kvtransfer.agents.nixl import NixlAgent
from kvtransfer.agents.nixl_reads import NixlCopy, NixlPeer
from kvtransfer.config import TransferConfig
from kvtransfer.memory import PoolMemory
from kvtransfer.transports.base import AgentLostError, TransportError
from kvtransfer.transports.thread import TransferThread

logger = logging.getLogger(__name__)


class NixlTransport:
    """One agent at a time with the whole pool registered.

    After ``rebuild`` every peer has to be connected again, and every reader of ours
    has to fetch our descriptor again.
    """

    name = "nixl"

    def __init__(
        self,
        config: TransferConfig,
        incarnation: str,
        memory: PoolMemory,
        thread: TransferThread,
        on_change: Callable[[], None],
    ) -> None:
        """Create the agent (about 0.5 s). ``on_change`` whenever ``ready`` changed."""
        self.ready = False
        self.problem = ""
        self._config = config
        self._memory = memory
        self._thread = thread
        self._on_change = on_change
        self._identity = AgentIdentity("nixl", config, incarnation, memory)
        self._agent: NixlAgent | None = None
        self._wait_s = config.reconnect_min_s
        self._serving = False
        self._closed = False
        self._open()

    def descriptor(self) -> kv_source_pb2.MemoryDescriptor:
        if self._agent is None:
            raise TransportError("the nixl agent is being rebuilt")
        region = self._identity.region(self._memory.base_address)
        return self._identity.descriptor(region, self._agent.metadata)

    def connect(self, descriptor: kv_source_pb2.MemoryDescriptor) -> "InsidePeer":
        region = verified_region(descriptor)
        if self._agent is None:
            raise AgentLostError("the nixl agent is being rebuilt")
        peer = NixlPeer(self._agent, descriptor.agent_metadata, region)
        return InsidePeer(peer, self._identity)

    def serve(self, active: bool) -> None:
        if active and not self._serving:
            self._thread.poll(self._serve)
        self._serving = active

    def rebuild(self) -> None:
        """Destroy the agent (unfinished copies end here) and make a new one."""
        self._end_agent()
        self._open()

    def close(self) -> None:
        self._closed = True
        self._end_agent()

    def _open(self) -> None:
        if self._closed or self._agent is not None:
            return
        try:
            settings = self._identity.next_life()
            self._agent = NixlAgent(settings, self._identity.region(self._memory.base_address))
        except TransportError as error:
            self.problem = str(error)
            logger.error("no nixl agent", extra={"error": self.problem})
            self._thread.later(self._wait_s, self._open)
            self._wait_s = min(2 * self._wait_s, self._config.reconnect_max_s)
        else:
            self.ready, self.problem = True, ""
            self._wait_s = self._config.reconnect_min_s
        self._on_change()

    def _end_agent(self) -> None:
        agent, self._agent = self._agent, None
        if agent is not None:
            self.ready = False
            self._on_change()
            agent.close()

    def _serve(self) -> bool:
        if self._agent is not None:
            try:
                self._agent.serve()
            except TransportError as error:  # of one reader: the others go on
                logger.debug("serving reads", extra={"error": str(error)})
        return not self._serving


class InsidePeer:
    """One source's pool. Useless once its agent is closed."""

    def __init__(self, peer: NixlPeer, identity: AgentIdentity) -> None:
        self._peer = peer
        self._identity = identity
        self.last_read_was_local: bool | None = None

    def read(
        self, source_block_ids: tuple[int, ...], local_block_ids: tuple[int, ...]
    ) -> "InsideCopy":
        return InsideCopy(self, self._peer, source_block_ids, local_block_ids)

    def write(self, local_block_ids: tuple[int, ...], offset: int, payload: bytes) -> NoReturn:
        raise TransportError("the source sent bytes that are read from its memory")

    def check_lane(self) -> None:
        """Judges the last read made."""
        self._identity.check_lane(self.last_read_was_local)

    def close(self) -> None:
        self._peer.close()


class InsideCopy:
    """One READ."""

    wakes = False

    def __init__(
        self,
        peer: InsidePeer,
        library_peer: NixlPeer,
        source_block_ids: tuple[int, ...],
        local_block_ids: tuple[int, ...],
    ) -> None:
        self._peer = peer
        self._copy = NixlCopy(
            library_peer,
            np.asarray(source_block_ids, dtype=np.int32),
            np.asarray(local_block_ids, dtype=np.int32),
        )

    def post(self) -> bool:
        self._peer.last_read_was_local = self._copy.post()
        return self._peer.last_read_was_local

    def poll(self) -> bool:
        return self._copy.poll()
