"""The nixl transport: one-sided reads of a source's registered pool, over UCX.

Here its agent lives inside the worker: for pools in GPU memory, which no child
process maps; ``transports.child`` is the usual form. Transfer thread only.

Facts that shape both: see ``transports.lanes`` and ``transports.agent_identity``.
"""

import logging
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from diptych.v1 import kv_source_pb2
from kvtransfer.agents.base import Region
from kvtransfer.agents.nixl import NixlAgent
from kvtransfer.agents.nixl_reads import NixlCopy, NixlPeer
from kvtransfer.block_shares import Pieces
from kvtransfer.config import TransferConfig
from kvtransfer.errors import AgentLostError, BrokenReadError, TransportError, UndeadAgentError
from kvtransfer.memory import PoolMemory
from kvtransfer.transports.agent_identity import AgentIdentity
from kvtransfer.transports.agent_life import DRAIN_S
from kvtransfer.transports.base import SilentPeer
from kvtransfer.transports.lanes import nixl_lanes
from kvtransfer.transports.thread import TransferThread

logger = logging.getLogger(__name__)


class InsideTransport:
    """One agent that serves, with the whole pool registered, and those that still drain.

    After ``rebuild`` every peer has to be connected again, and every reader of ours
    has to fetch our descriptor again.
    """

    name = "nixl"

    def __init__(
        self,
        config: TransferConfig,
        agent_name: str,
        memory: PoolMemory,
        thread: TransferThread,
        on_change: Callable[[], None],
    ) -> None:
        """Create the agent (about 0.5 s). ``on_change`` whenever ``ready`` changed."""
        self.problem = ""
        self.undead: UndeadAgentError | None = None
        self._num_retiring = 0
        self._config = config
        self._memory = memory
        self._thread = thread
        self._on_change = on_change
        self._identity = AgentIdentity("nixl", nixl_lanes, config, agent_name, memory)
        self._agent: NixlAgent | None = None
        self._wait_s = config.reconnect_min_s
        self._serving = False
        self._is_polled = False  # ends at its own next turn, not before
        self._closed = False
        self._open()

    @property
    def ready(self) -> bool:
        return self._agent is not None

    @property
    def retiring(self) -> bool:
        return self._num_retiring > 0

    def descriptor(self) -> kv_source_pb2.MemoryDescriptor:
        if self._agent is None:
            raise TransportError("the nixl agent is being rebuilt")
        region = self._identity.region(self._memory.base_address)
        return self._identity.descriptor(region, self._agent.metadata)

    def connect(
        self,
        descriptor: kv_source_pb2.MemoryDescriptor,
        block_bytes: int | None = None,
        pieces: Pieces | None = None,
    ) -> "InsidePeer":
        """As ``RankTransport``."""
        region = self._identity.source_region(descriptor, block_bytes)
        if self._agent is None:
            raise AgentLostError("the nixl agent is being rebuilt")
        peer = NixlPeer(self._agent, descriptor.agent_metadata, region, pieces)
        return InsidePeer(self, peer, self._identity, region)

    def serve(self, active: bool) -> None:
        self._serving = active
        if active and not self._is_polled:
            self._is_polled = True
            self._thread.poll(self._serve)

    def rebuild(self) -> None:
        """Make a new agent; destroy the old one when its reads have ended, or soon."""
        old, self._agent = self._agent, None
        if old is None:
            return
        self._num_retiring += 1
        self._on_change()
        self._open()
        self._thread.poll(partial(self._retired, old, time.monotonic() + DRAIN_S))

    def serves(self, agent: NixlAgent) -> bool:
        return agent is self._agent

    def broke(self, agent: NixlAgent, error: TransportError) -> None:
        """A read of it met ``error`` and is ended by its end only."""
        if self.serves(agent):
            extra = {"transport": self.name, "error": str(error)}
            logger.warning("a read met an error: its agent is replaced", extra=extra)
            self.rebuild()

    def close(self) -> None:
        """As the process ends: with it so does an agent that outlives this."""
        self._closed = True
        agent, self._agent = self._agent, None
        if agent is not None:
            self._on_change()
            self._end(agent)

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
            self.problem = ""
            self._wait_s = self._config.reconnect_min_s
        self._on_change()

    def _retired(self, agent: NixlAgent, until_s: float) -> bool:
        """Poll: end it when its reads have ended, or at ``until_s``; True once that was tried."""
        if agent.num_reads and time.monotonic() < until_s:
            return False
        if self._end(agent):
            self._num_retiring -= 1
        self._on_change()
        return True

    def _end(self, agent: NixlAgent) -> bool:
        try:
            agent.close()
        except UndeadAgentError as error:
            logger.critical("a transport agent outlives its teardown: the process has to end")
            self.undead = error
            return False
        return True

    def _serve(self) -> bool:
        if self._agent is not None:
            try:
                self._agent.serve()
            except TransportError as error:  # of one reader: the others go on
                logger.debug("serving reads", extra={"error": str(error)})
        self._is_polled = self._serving
        return not self._serving


class InsidePeer(SilentPeer):
    """One source's pool. Useless once its agent is to end."""

    def __init__(
        self,
        transport: InsideTransport,
        peer: NixlPeer,
        identity: AgentIdentity,
        region: Region,
    ) -> None:
        self.last_read_was_local: bool | None = None
        self._transport = transport
        self._peer = peer
        self._identity = identity
        self._region = region

    @property
    def usable(self) -> bool:
        return self._peer.usable and self._transport.serves(self._peer.agent)

    def read(
        self,
        source_block_ids: tuple[int, ...],
        local_block_ids: tuple[int, ...],
        num_bytes: int | None = None,
    ) -> "InsideCopy":
        self._region.check_blocks(source_block_ids)
        copy = NixlCopy(
            self._peer,
            np.asarray(source_block_ids, dtype=np.int32),
            np.asarray(local_block_ids, dtype=np.int32),
            num_bytes or self._region.block_bytes,
        )
        return InsideCopy(self, self._peer.agent, copy)

    def broke(self, error: TransportError) -> None:
        """A read of it met ``error`` and is ended by its agent's end only."""
        self._transport.broke(self._peer.agent, error)

    def check_lane(self) -> None:
        """Judges the last read made."""
        self._identity.check_lane(self.last_read_was_local)

    def close(self) -> None:
        self._peer.close()


class InsideCopy:
    """One READ."""

    wakes = False

    def __init__(self, peer: InsidePeer, agent: NixlAgent, copy: NixlCopy) -> None:
        self._peer = peer
        self._agent = agent
        self._broken: TransportError | None = None  # ended by the agent's end only
        self._copy = copy

    def post(self) -> bool:
        if not self._peer.usable:
            raise AgentLostError("the connection to the source was closed")
        is_done = self._advance(self._copy.post)
        self._peer.last_read_was_local = is_done
        return is_done

    def poll(self) -> bool:
        if self._broken is None:
            return self._advance(self._copy.poll)
        if self._agent.is_gone:
            raise self._broken
        return False

    def _advance(self, step: Callable[[], bool]) -> bool:
        try:
            return step()
        except BrokenReadError as broken:
            self._broken = broken.error
            self._broken.broke_agent = True
            self._peer.broke(broken.error)
        return False
