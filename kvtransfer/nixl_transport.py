"""The nixl transport: one-sided reads of a source's registered pool, over UCX.

Everything here runs on the transfer thread. Facts that shape it: metadata is
accepted with flipped bits, so its digest is checked first; a handle released while
a read is under way does not stop it, so unfinished copies are polled to their end;
reads over TCP can crash the process that is read, so they are refused unless allowed.

Which way the bytes go ("lane") cannot be asked. Cross-memory attach copies inside
``transfer()``, so a warm read that is still in progress when it returns went over a
network. UCX refuses to start without TCP as the carrier of its small messages on a
machine without RDMA, so TCP cannot simply be excluded there; with RDMA devices it is.
"""

import logging
from typing import Any, NoReturn

import numpy as np

from diptych.v1 import kv_source_pb2
from kvtransfer.config import TransferConfig
from kvtransfer.digest import descriptor_digest
from kvtransfer.memory import PoolMemory
from kvtransfer.nixl_agent import NixlAgent, block_rows, describe, ucx_transports
from kvtransfer.transport import TransportError

logger = logging.getLogger(__name__)


class NixlTransport:
    """One agent at a time, named by incarnation and epoch, with the whole pool registered.

    After ``rebuild`` every peer has to be connected again, and every reader of ours
    has to fetch our descriptor again.
    """

    name = "nixl"

    def __init__(self, config: TransferConfig, incarnation: str, memory: PoolMemory) -> None:
        """Create the agent (about 0.5 s). Raises ConfigurationError."""
        self._config = config
        self._incarnation = incarnation
        self._memory = memory
        self._epoch = 0
        tls = ucx_transports(config, memory.memory_kind)
        self.may_use_network = config.allow_nixl_tcp or not {"tcp", "all"} & set(tls)
        self._agent = self._new_agent()

    def descriptor(self) -> kv_source_pb2.MemoryDescriptor:
        memory = self._memory
        descriptor = kv_source_pb2.MemoryDescriptor(
            agent_metadata=self._agent.metadata,
            base_address=memory.base_address,
            block_bytes=memory.block_bytes,
            num_blocks=memory.num_blocks,
            memory_kind=memory.memory_kind,
            device_id=memory.device_id,
        )
        descriptor.digest = descriptor_digest(descriptor)
        return descriptor

    def connect(self, descriptor: kv_source_pb2.MemoryDescriptor) -> "NixlPeer":
        """Verify a source's descriptor, then hand it to the library. Raises TransportError."""
        if descriptor.digest != descriptor_digest(descriptor):
            raise TransportError("the source's memory descriptor was damaged on its way")
        try:
            return NixlPeer(self._agent, descriptor, self.may_use_network)
        except Exception as error:
            raise self._agent.translated(error) from error

    def serve(self) -> None:
        self._agent.serve()

    def rebuild(self) -> None:
        """Destroy the agent (unfinished copies end here) and make a new one."""
        self._agent.close()
        self._agent = self._new_agent()

    def close(self) -> None:
        """Destroy the agent; copies that were unfinished report TransportError next."""
        self._agent.close()

    def _new_agent(self) -> NixlAgent:
        self._epoch += 1
        return NixlAgent(self._config, f"{self._incarnation}.{self._epoch}", self._memory)


class NixlPeer:
    """One source's pool, as prepared descriptors. Useless once its agent is closed."""

    def __init__(
        self, agent: NixlAgent, descriptor: kv_source_pb2.MemoryDescriptor, may_use_network: bool
    ) -> None:
        self.agent = agent
        self.num_live_copies = 0
        self.last_read_was_local: bool | None = None
        self._may_use_network = may_use_network
        self._closing = False
        self._name = agent.raw.add_remote_agent(descriptor.agent_metadata)
        rows = block_rows(
            descriptor.base_address,
            descriptor.block_bytes,
            descriptor.num_blocks,
            descriptor.device_id,
        )
        try:
            self.blocks: Any = agent.raw.prep_xfer_dlist(self._name, rows, descriptor.memory_kind)
        except Exception:
            agent.raw.remove_remote_agent(self._name)
            raise
        agent.dependents.add(self)

    @property
    def usable(self) -> bool:
        return not self._closing and self.agent.raw is not None and self.blocks is not None

    def read(
        self, source_block_ids: tuple[int, ...], local_block_ids: tuple[int, ...]
    ) -> "NixlCopy":
        return NixlCopy(self, source_block_ids, local_block_ids)

    def write(self, local_block_ids: tuple[int, ...], offset: int, payload: bytes) -> NoReturn:
        raise TransportError("the source sent bytes that are read from its memory")

    def check_lane(self) -> None:
        """Refuse TCP (see the module's docstring). Judges the last read made."""
        if self.last_read_was_local is False and not self._may_use_network:
            raise TransportError(
                "nixl would read over TCP: cross-memory attach does not reach the source "
                "(another machine, user or pid namespace, or ptrace is restricted)"
            )

    def close(self) -> None:
        self._closing = True
        self.close_if_idle()

    def close_if_idle(self) -> None:
        """Once closing, forget the peer when its last copy has ended: reads under way need it."""
        if not self._closing or self.num_live_copies or self.blocks is None:
            return
        try:
            self.agent.raw.remove_remote_agent(self._name)
        except Exception as error:  # noqa: BLE001 - a dead peer's entry may be gone already
            logger.debug("nixl peer", extra={"error": describe(error)})
        self.drop_handles()

    def drop_handles(self) -> None:
        """Also called while the agent is being destroyed."""
        blocks, self.blocks = self.blocks, None
        self._closing = True
        _release(blocks)
        self.agent.dependents.discard(self)


class NixlCopy:
    """One READ. Its handle is released only when the library says it ended."""

    def __init__(
        self, peer: NixlPeer, source_block_ids: tuple[int, ...], local_block_ids: tuple[int, ...]
    ) -> None:
        self._peer = peer
        self._handle: Any = None
        source = np.asarray(source_block_ids, dtype=np.int32)
        order = np.argsort(source, kind="stable")  # neighbours merge into one descriptor
        self._source_block_ids = source[order]
        self._local_block_ids = np.asarray(local_block_ids, dtype=np.int32)[order]

    def post(self) -> bool:
        peer, agent = self._peer, self._peer.agent
        if not peer.usable:
            raise TransportError("the connection to the source was closed")
        try:
            self._handle = agent.raw.make_prepped_xfer(
                "READ",
                agent.local_blocks,
                self._local_block_ids,
                peer.blocks,
                self._source_block_ids,
            )
        except Exception as error:
            raise agent.translated(error) from error
        agent.dependents.add(self)
        peer.num_live_copies += 1
        peer.last_read_was_local = self._advance("transfer")
        return peer.last_read_was_local

    def poll(self) -> bool:
        if self._handle is None:
            raise TransportError("the transport agent was torn down")
        return self._advance("check_xfer_state")

    def drop_handles(self) -> None:
        """The read ended, or its agent is being destroyed."""
        handle, self._handle = self._handle, None
        _release(handle)
        self._peer.agent.dependents.discard(self)
        self._peer.num_live_copies -= 1
        self._peer.close_if_idle()

    def _advance(self, step: str) -> bool:
        """Call the agent's ``step``; True when the read is done. Raises TransportError.

        No local variable names the agent: an error would keep it alive.
        """
        try:
            state = getattr(self._peer.agent.raw, step)(self._handle)
        except Exception as error:
            self.drop_handles()
            raise self._peer.agent.translated(error) from error
        if state == "PROC":
            return False
        self.drop_handles()
        if state != "DONE":
            raise TransportError(f"nixl: the read ended as {state}")
        return True


def _release(handle: Any) -> None:
    try:
        handle.release()
    except Exception as error:  # noqa: BLE001 - it ended, or its agent is about to
        logger.debug("nixl release", extra={"error": describe(error)})
