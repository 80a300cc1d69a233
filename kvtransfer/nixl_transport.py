"""The nixl transport: one-sided reads of a source's registered pool, over UCX.

Here its agent lives inside the worker: for pools in GPU memory, which no child
process maps; ``nixl_child`` is the usual form. Transfer thread only.

Facts that shape both: metadata is accepted with flipped bits, so its digest is checked
first; reads over TCP can crash the process that is read, so they are refused unless
allowed. Which way the bytes go ("lane") cannot be asked. Cross-memory attach copies
inside ``transfer()``, so a warm read that is still in progress when it returns went over
a network. UCX refuses to start without TCP as the carrier of its small messages on a
machine without RDMA, so TCP cannot simply be excluded there; with RDMA devices it is.
"""

import logging
from collections.abc import Callable
from typing import NoReturn

import numpy as np

from diptych.v1 import kv_source_pb2
from kvtransfer.config import TransferConfig
from kvtransfer.digest import descriptor_digest
from kvtransfer.memory import PoolMemory
from kvtransfer.nixl_agent import AgentSettings, NixlAgent, Region
from kvtransfer.nixl_reads import NixlCopy, NixlPeer
from kvtransfer.transfer_thread import TransferThread
from kvtransfer.transport import AgentLostError, TransportError

logger = logging.getLogger(__name__)


def ucx_transports(config: TransferConfig, memory_kind: str) -> tuple[str, ...]:
    """UCX_TLS for these settings: RDMA devices are named ``mlx5_0:1``, others have no colon."""
    if config.nixl_tls is not None:
        return config.nixl_tls
    rdma = any(":" in device for device in config.nixl_net_devices.split(","))
    names = ["cma", *(["rc", "dc", "ud"] if rdma else ["tcp"])]
    if rdma and config.allow_nixl_tcp:
        names.append("tcp")
    if memory_kind == "VRAM":
        names += ["cuda_copy", "cuda_ipc"]
    return tuple(names)


class AgentIdentity:
    """Names each life of a worker's agent: incarnation and epoch; describes it to peers."""

    def __init__(self, config: TransferConfig, incarnation: str, memory: PoolMemory) -> None:
        tls = ucx_transports(config, memory.memory_kind)
        self.epoch = 0  # of the current life, or the last one
        self.may_use_network = config.allow_nixl_tcp or not {"tcp", "all"} & set(tls)
        self._incarnation = incarnation
        self._ucx_tls = ",".join(tls)
        self._net_devices = config.nixl_net_devices
        self._memory = memory

    def next_life(self) -> AgentSettings:
        self.epoch += 1
        name = f"{self._incarnation}.{self.epoch}"
        return AgentSettings(name, self._ucx_tls, self._net_devices)

    def region(self, base_address: int) -> Region:
        memory = self._memory
        return Region(
            base_address,
            memory.block_bytes,
            memory.num_blocks,
            memory.memory_kind,
            memory.device_id,
        )

    def descriptor(self, region: Region, metadata: bytes) -> kv_source_pb2.MemoryDescriptor:
        descriptor = kv_source_pb2.MemoryDescriptor(agent_metadata=metadata, **region._asdict())
        descriptor.digest = descriptor_digest(descriptor)
        return descriptor


def verified_region(descriptor: kv_source_pb2.MemoryDescriptor) -> Region:
    """A source's pool, from a descriptor that arrived whole. Raises TransportError."""
    if descriptor.digest != descriptor_digest(descriptor):
        raise TransportError("the source's memory descriptor was damaged on its way")
    return Region(
        descriptor.base_address,
        descriptor.block_bytes,
        descriptor.num_blocks,
        descriptor.memory_kind,
        descriptor.device_id,
    )


def refuse_network() -> None:
    """See the module's docstring. Raises TransportError."""
    raise TransportError(
        "nixl would read over TCP: cross-memory attach does not reach the source "
        "(another machine, user or pid namespace, or ptrace is restricted)"
    )


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
        self._identity = AgentIdentity(config, incarnation, memory)
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
        return InsidePeer(peer, self._identity.may_use_network)

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

    def __init__(self, peer: NixlPeer, may_use_network: bool) -> None:
        self._peer = peer
        self._may_use_network = may_use_network
        self.last_read_was_local: bool | None = None

    def read(
        self, source_block_ids: tuple[int, ...], local_block_ids: tuple[int, ...]
    ) -> "InsideCopy":
        return InsideCopy(self, self._peer, source_block_ids, local_block_ids)

    def write(self, local_block_ids: tuple[int, ...], offset: int, payload: bytes) -> NoReturn:
        raise TransportError("the source sent bytes that are read from its memory")

    def check_lane(self) -> None:
        """Refuse TCP (see the module's docstring). Judges the last read made."""
        if self.last_read_was_local is False and not self._may_use_network:
            refuse_network()

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
