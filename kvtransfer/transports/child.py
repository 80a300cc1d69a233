"""A transport whose agent, of any library, is in a process of its own (``agent_main``).

Whatever crashes or hangs in the library ends that process, never this one; its reads
are over with it, for certain, and a new one is started. Transfer thread only.
"""

import itertools
import logging
import time
from collections.abc import Callable
from typing import NoReturn

import numpy as np

from diptych.v1 import kv_source_pb2
from kvtransfer.agents.identity import AgentIdentity, verified_region
from kvtransfer.agents.process import AgentProcess, SharedPool
from kvtransfer.agents.wire import Kind, Message, ReadCommand, pack_peer, unpack_error
from kvtransfer.config import TransferConfig
from kvtransfer.memory import PoolMemory
from kvtransfer.transports.base import AgentLostError, TransportError
from kvtransfer.transports.thread import TransferThread

logger = logging.getLogger(__name__)

_STEADY_S = 10.0  # a process that lived for this long is replaced at once


class ChildTransport:
    """One process at a time; the next one follows, after a growing pause if they die young."""

    def __init__(
        self,
        name: str,
        config: TransferConfig,
        incarnation: str,
        memory: PoolMemory,
        thread: TransferThread,
        on_change: Callable[[], None],
    ) -> None:
        """Start the process. ``name`` is the library's; ``memory`` must be shared.

        ``on_change`` is called whenever ``ready`` or ``problem`` changed.
        """
        assert memory.shared_fd is not None
        self.name = name
        self.ready = False
        self.problem = ""
        self.process: AgentProcess | None = None
        self._config = config
        self._thread = thread
        self._on_change = on_change
        self._pool = SharedPool(memory.shared_fd, memory.block_bytes, memory.num_blocks)
        self._identity = AgentIdentity(name, config, incarnation, memory)
        self._descriptor: kv_source_pb2.MemoryDescriptor | None = None
        self._copies: dict[int, ChildCopy] = {}  # posted, not ended
        self._ids = itertools.count(1)  # of peers and reads
        self._wait_s = 0.0
        self._started_s = 0.0
        self._serving = False
        self._closed = False
        self._start()

    def descriptor(self) -> kv_source_pb2.MemoryDescriptor:
        if self._descriptor is None:
            raise TransportError(self.problem or f"the {self.name} agent is being rebuilt")
        return self._descriptor

    def connect(self, descriptor: kv_source_pb2.MemoryDescriptor) -> "ChildPeer":
        region = verified_region(descriptor)
        if not self.ready:
            raise AgentLostError(f"the {self.name} agent is being rebuilt")
        peer = ChildPeer(self, next(self._ids), self._identity.epoch, region.num_blocks)
        payload = pack_peer(region, descriptor.agent_metadata)
        self.send(Message(Kind.CONNECT, peer.id, payload))
        return peer

    def serve(self, active: bool) -> None:
        if active is not self._serving:
            self._serving = active
            self.send(Message(Kind.SERVE, int(active)))

    def rebuild(self) -> None:
        """End the process, and all of its reads with it; another one is started."""
        if self.process is not None:
            self.process.kill("torn down")

    def close(self) -> None:
        self._closed = True
        if self.process is not None:
            self.process.close()

    # For ChildPeer and ChildCopy

    @property
    def epoch(self) -> int:
        return self._identity.epoch

    def check_lane(self, last_read_was_local: bool | None) -> None:
        self._identity.check_lane(last_read_was_local)

    def send(self, message: Message) -> None:
        if self.process is not None:
            self.process.send(message)

    def begin(self, copy: "ChildCopy", command: ReadCommand) -> None:
        read_id = next(self._ids)
        self._copies[read_id] = copy
        self.send(Message(Kind.READ, read_id, command.packed()))

    # AgentOwner

    def on_message(self, message: Message) -> None:
        match message.kind:
            case Kind.READY:
                region = self._identity.region(message.id)
                self._descriptor = self._identity.descriptor(region, message.payload)
                self.ready, self.problem = True, ""
                self.send(Message(Kind.SERVE, int(self._serving)))
                self._on_change()
            case Kind.DONE:
                self._copies.pop(message.id).ended(was_local=message.payload == b"\1")
            case Kind.FAILED:
                self._copies.pop(message.id).ended(error=unpack_error(message.payload))
            case Kind.UNABLE:
                self.problem = str(unpack_error(message.payload))
                self._wait_s = self._config.reprove_s  # to load the library costs CPU

    def on_end(self, why: str) -> None:
        self.process = self._descriptor = None
        lost = len(self._copies)
        for copy in self._copies.values():
            copy.ended(error=AgentLostError(f"the {self.name} agent's process ended: {why}"))
        self._copies.clear()
        if not self.ready and not self.problem:
            self.problem = f"the {self.name} agent's process ended as it started: {why}"
        self.ready = False
        self._on_change()
        if self._closed:
            return
        if time.monotonic() - self._started_s > _STEADY_S:
            self._wait_s = 0.0
        logger.error(
            "transport agent's process ended",
            extra={
                "transport": self.name,
                "why": self.problem or why,
                "num_reads": lost,
                "wait_s": self._wait_s,
            },
        )
        self._thread.later(self._wait_s, self._start)
        doubled_s = max(2 * self._wait_s, self._config.reconnect_min_s)
        self._wait_s = min(doubled_s, self._config.reconnect_max_s)

    def _start(self) -> None:
        if self._closed:
            return
        self._started_s = time.monotonic()
        try:
            self.process = AgentProcess(
                self.name,
                self._identity.next_life(),
                self._pool,
                self,
                self._thread,
                self._config.agent_answer_s,
            )
        except OSError as error:
            self.problem = f"the {self.name} agent's process cannot start: {error}"
            self.on_end(str(error))


class ChildPeer:
    """One source's pool. Useless once the process that knew it has ended."""

    def __init__(self, transport: ChildTransport, id_: int, epoch: int, num_blocks: int) -> None:
        self.id = id_
        self.last_read_was_local: bool | None = None
        self._transport = transport
        self._epoch = epoch
        self._num_blocks = num_blocks
        self._closed = False

    @property
    def usable(self) -> bool:
        return not self._closed and self._transport.ready and self._transport.epoch == self._epoch

    def read(
        self, source_block_ids: tuple[int, ...], local_block_ids: tuple[int, ...]
    ) -> "ChildCopy":
        if (last := max(source_block_ids)) >= self._num_blocks:
            raise TransportError(
                f"block {last} was announced, the source has {self._num_blocks} blocks"
            )
        command = ReadCommand(
            self.id,
            np.asarray(source_block_ids, dtype=np.int32),
            np.asarray(local_block_ids, dtype=np.int32),
        )
        return ChildCopy(self._transport, self, command)

    def write(self, local_block_ids: tuple[int, ...], offset: int, payload: bytes) -> NoReturn:
        raise TransportError("the source sent bytes that are read from its memory")

    def check_lane(self) -> None:
        """Judges the last read made."""
        self._transport.check_lane(self.last_read_was_local)

    def close(self) -> None:
        if self.usable:
            self._transport.send(Message(Kind.DISCONNECT, self.id))
        self._closed = True


class ChildCopy:
    """One READ, over when the process said so or is gone."""

    wakes = True

    def __init__(self, transport: ChildTransport, peer: ChildPeer, command: ReadCommand) -> None:
        self._transport = transport
        self._peer = peer
        self._command = command
        self._has_ended = False
        self._error: TransportError | None = None

    def post(self) -> bool:
        if not self._peer.usable:
            raise AgentLostError("the connection to the source was closed")
        self._transport.begin(self, self._command)
        return False

    def poll(self) -> bool:
        if self._error is not None:
            raise self._error
        return self._has_ended

    def ended(self, *, was_local: bool = False, error: TransportError | None = None) -> None:
        self._has_ended = True
        self._error = error
        if error is None:
            self._peer.last_read_was_local = was_local
