"""A transport whose agent, of any library, is in a process of its own (``agents.main``).

Whatever crashes or hangs in the library ends that process, never this one; its reads
are over with it, for certain, and a new one is started. Transfer thread only.
"""

import itertools
import logging
import time
from collections.abc import Callable

import numpy as np

from diptych.v1 import kv_source_pb2
from kvtransfer.agents.base import Region
from kvtransfer.agents.wire import Kind, Message, PeerCommand, ReadCommand
from kvtransfer.block_shares import Pieces
from kvtransfer.config import TransferConfig
from kvtransfer.errors import AgentLostError, TransportError
from kvtransfer.memory import PoolMemory
from kvtransfer.transports.agent_identity import AgentIdentity
from kvtransfer.transports.agent_life import AgentLife, LifeState
from kvtransfer.transports.agent_process import AgentProcess, SharedPool
from kvtransfer.transports.base import SilentPeer
from kvtransfer.transports.lanes import LanesOf
from kvtransfer.transports.thread import TransferThread

logger = logging.getLogger(__name__)

_STEADY_S = 10.0  # a process that lived for this long is replaced at once
REPLACE_S = 1.0  # that an agent which is to end serves on while the next one starts


class ChildTransport:
    """One process that serves, the next one where that is to end, and those that still drain.

    One that ends by itself is followed by another, after a growing pause if they die young.
    """

    undead = None  # the end of a process is certain

    def __init__(
        self,
        name: str,
        lanes_of: LanesOf,
        config: TransferConfig,
        agent_name: str,
        memory: PoolMemory,
        thread: TransferThread,
        on_change: Callable[[], None],
        *,
        read_only: bool = False,
    ) -> None:
        """Start the process. ``name`` is the library's, as ``agents.main`` has it; ``memory``
        must be shared.

        ``read_only``: no peer will be connected, so the process need not write the pool
        (with RDMA it has to be able to: devices register memory for writing).
        ``on_change`` is called whenever something that the event loop may read changed.
        """
        assert memory.shared_fd is not None
        self.name = name
        self.problem = ""
        self._config = config
        self._thread = thread
        self._on_change = on_change
        self._pool = SharedPool(
            memory.shared_fd,
            memory.block_bytes,
            memory.num_blocks,
            read_only and not config.uses_rdma,
        )
        self._identity = AgentIdentity(name, lanes_of, config, agent_name, memory)
        self._serving: AgentLife | None = None
        self._starting: AgentLife | None = None
        self._retiring: set[AgentLife] = set()  # that were to end, and have not yet
        self._descriptor: kv_source_pb2.MemoryDescriptor | None = None  # of the serving one
        self._peer_ids = itertools.count(1)
        self._wait_s = 0.0
        self._ready_s: float | None = None  # since when the last one serves, or served; None: never
        self._is_read = False  # by peers
        self._closed = False
        self._start()

    @property
    def ready(self) -> bool:
        return self._serving is not None

    @property
    def retiring(self) -> bool:
        return bool(self._retiring)

    @property
    def pid(self) -> int | None:
        """Of the process that serves."""
        return None if self._serving is None else self._serving.pid

    def descriptor(self) -> kv_source_pb2.MemoryDescriptor:
        if self._descriptor is None:
            raise TransportError(self.problem or f"the {self.name} agent is being rebuilt")
        return self._descriptor

    def connect(
        self,
        descriptor: kv_source_pb2.MemoryDescriptor,
        block_bytes: int | None = None,
        pieces: Pieces | None = None,
    ) -> "ChildPeer":
        """As ``RankTransport``."""
        region = self._identity.source_region(descriptor, block_bytes)
        if self._serving is None:
            raise AgentLostError(f"the {self.name} agent is being rebuilt")
        peer = ChildPeer(next(self._peer_ids), self._serving, self._identity, region)
        command = PeerCommand(region, descriptor.agent_metadata, pieces)
        self._serving.send(Message(Kind.CONNECT, peer.id, command.packed()))
        return peer

    def serve(self, active: bool) -> None:
        if active or self._is_read:
            self._is_read = active
            if self._serving is not None:
                self._serving.send(Message(Kind.SERVE, int(active)))

    def rebuild(self) -> None:
        """Start the next process; the one that serves does so until that is ready, or soon."""
        life = self._serving
        if life is None or life in self._retiring:  # the next one is on its way already
            return
        self._retiring.add(life)
        self._thread.later(REPLACE_S, lambda: self._retire(life))
        self._start()
        self._on_change()

    def close(self) -> None:
        self._closed = True
        for life in (self._serving, self._starting, *self._retiring):
            if life is not None:
                life.close()

    # LifeOwner

    def on_ready(self, life: AgentLife, base_address: int, metadata: bytes) -> None:
        before, self._serving, self._starting = self._serving, life, None
        self._ready_s = time.monotonic()
        region = self._identity.region(base_address)
        self._descriptor = self._identity.descriptor(region, metadata)
        self.problem = ""
        life.send(Message(Kind.SERVE, int(self._is_read)))
        if before is not None:
            before.retire("replaced")
        self._on_change()

    def on_unable(self, life: AgentLife, error: TransportError) -> None:
        self.problem = str(error)
        self._wait_s = self._config.reprove_s  # to load the library costs CPU

    def on_broken(self, life: AgentLife, error: TransportError) -> None:
        if life is self._serving and life not in self._retiring:  # of many reads the first
            extra = {"transport": self.name, "error": str(error)}
            logger.warning("a read met an error: its agent is replaced", extra=extra)
            self.rebuild()

    def on_life_end(self, life: AgentLife, why: str, num_reads: int) -> None:
        expected = life in self._retiring
        self._retiring.discard(life)
        if life is self._serving:
            self._serving = self._descriptor = None
        if life is self._starting:
            self._starting = None
            self.problem = (
                self.problem or f"the {self.name} agent's process ended as it started: {why}"
            )
        report = logger.info if expected or self._closed else logger.error
        report(
            "transport agent's process ended",
            extra={
                "transport": self.name,
                "why": self.problem or why,
                "num_reads": num_reads,
                "wait_s": self._wait_s,
            },
        )
        self._start_later()
        self._on_change()

    def _retire(self, life: AgentLife) -> None:
        """The next one takes too long: do without, until it is ready."""
        if life is self._serving:
            self._serving = self._descriptor = None
        life.retire("replaced")
        self._on_change()

    def _start_later(self) -> None:
        """At once, or after a growing pause if they die young; if one is needed then."""
        if not self._needs_another():
            return
        if self._ready_s is not None and time.monotonic() - self._ready_s > _STEADY_S:
            self._wait_s = 0.0
        self._thread.later(self._wait_s, self._start)
        doubled_s = max(2 * self._wait_s, self._config.reconnect_min_s)
        self._wait_s = min(doubled_s, self._config.reconnect_max_s)

    def _needs_another(self) -> bool:
        """Whether none serves that is to go on, and none is on its way."""
        serves_on = self._serving is not None and self._serving not in self._retiring
        return not (self._closed or serves_on or self._starting is not None)

    def _start(self) -> None:
        if not self._needs_another():
            return
        self._ready_s = None
        life = self._starting = AgentLife(self.name, self, self._thread)
        settings = self._identity.next_life()
        try:
            life.start(
                lambda owner: AgentProcess(
                    self.name,
                    settings,
                    self._pool,
                    owner,
                    self._thread,
                    self._config.agent_answer_s,
                )
            )
        except OSError as error:
            self.problem = f"the {self.name} agent's process cannot start: {error}"
            life.on_end(str(error))


class ChildPeer(SilentPeer):
    """One source's pool. Useless once the process that knows it is to end."""

    def __init__(self, id_: int, life: AgentLife, identity: AgentIdentity, region: Region) -> None:
        self.id = id_
        self.last_read_was_local: bool | None = None
        self._life = life
        self._identity = identity
        self._region = region
        self._closed = False

    @property
    def usable(self) -> bool:
        return not self._closed and self._life.state is LifeState.SERVING

    def lost(self) -> TransportError:
        """What a read meets where it is not usable."""
        if self._closed:
            return AgentLostError("the connection to the source was closed")
        return self._life.lost(self.id)

    def read(
        self,
        source_block_ids: tuple[int, ...],
        local_block_ids: tuple[int, ...],
        num_bytes: int | None = None,
    ) -> "ChildCopy":
        self._region.check_blocks(source_block_ids)
        command = ReadCommand(
            self.id,
            num_bytes or self._region.block_bytes,
            np.asarray(source_block_ids, dtype=np.int32),
            np.asarray(local_block_ids, dtype=np.int32),
        )
        return ChildCopy(self._life, self, command)

    def check_lane(self) -> None:
        """Judges the last read made."""
        self._identity.check_lane(self.last_read_was_local)

    def close(self) -> None:
        """The process forgets the peer when its last read has ended."""
        if not self._closed:
            self._closed = True
            self._life.send(Message(Kind.DISCONNECT, self.id))


class ChildCopy:
    """One READ, over when the process said so or is gone."""

    wakes = True

    def __init__(self, life: AgentLife, peer: ChildPeer, command: ReadCommand) -> None:
        self._life = life
        self._peer = peer
        self._command = command
        self.has_ended = False  # well or not
        self._error: TransportError | None = None

    def post(self) -> bool:
        if not self._peer.usable:
            raise self._peer.lost()
        self._life.begin(self, self._command)
        return False

    def poll(self) -> bool:
        if self._error is not None:
            raise self._error
        return self.has_ended

    def ended(self, *, was_local: bool = False, error: TransportError | None = None) -> None:
        """As PostedRead."""
        self.has_ended = True
        self._error = error
        if error is None:
            self._peer.last_read_was_local = was_local
