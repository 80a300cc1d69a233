"""What a worker's transport agents are made with, and how peers get to know them.

Facts that shape this: metadata is accepted by the library with flipped bits, so its
digest is checked first. Which way the bytes go ("lane") cannot be asked: cross-memory
attach copies inside nixl's ``transfer()``, so a warm read that is still in progress when
it returns went over a network. ``transports.lanes`` says which ways will do.
"""

from diptych.v1 import kv_source_pb2
from kvtransfer.agents.base import AgentSettings, Region
from kvtransfer.config import TransferConfig
from kvtransfer.digest import descriptor_digest
from kvtransfer.errors import TransportError
from kvtransfer.memory import PoolMemory
from kvtransfer.transports.lanes import LanesOf

_MEMORY_KINDS = ("DRAM", "VRAM")
# Of a source: 24 bytes of descriptor each in every reader's agent. 2 TB of blocks of 2 MiB.
_MAX_BLOCKS = 1 << 20


class AgentIdentity:
    """Names each life of an agent: a name of its own and an epoch; describes it to peers."""

    def __init__(
        self,
        library: str,
        lanes_of: LanesOf,
        config: TransferConfig,
        agent_name: str,
        memory: PoolMemory,
    ) -> None:
        self.epoch = 0  # of the current life, or the last one
        self._library = library
        self._lanes = lanes_of(config, memory.memory_kind)
        self._agent_name = agent_name
        self._net_devices = config.ucx_net_devices
        self._memory = memory

    def next_life(self) -> AgentSettings:
        self.epoch += 1
        name = f"{self._agent_name}.{self.epoch}"
        return AgentSettings(name, ",".join(self._lanes.ucx_tls), self._net_devices)

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

    def source_region(
        self, descriptor: kv_source_pb2.MemoryDescriptor, block_bytes: int | None = None
    ) -> Region:
        """A source's pool as it described it. Raises TransportError: damaged, or not sound.

        block_bytes: that its blocks must have; None: those of ours.
        Whatever is accepted is handed to the library, with this much work for each block.
        """
        if descriptor.digest != descriptor_digest(descriptor):
            raise TransportError("the source's memory descriptor was damaged on its way")
        region = Region(
            descriptor.base_address,
            descriptor.block_bytes,
            descriptor.num_blocks,
            descriptor.memory_kind,
            descriptor.device_id,
        )
        if region.memory_kind not in _MEMORY_KINDS:
            raise TransportError(
                f"the source has memory of the kind {region.memory_kind!r}, none of "
                f"{', '.join(_MEMORY_KINDS)}"
            )
        wanted_bytes = block_bytes or self._memory.block_bytes
        if region.block_bytes != wanted_bytes:
            raise TransportError(
                f"the source has blocks of {region.block_bytes} bytes, here are {wanted_bytes}"
            )
        if not 1 <= region.num_blocks <= _MAX_BLOCKS:
            raise TransportError(
                f"the source has {region.num_blocks} blocks, not 1 to {_MAX_BLOCKS}"
            )
        if region.base_address + region.num_blocks * region.block_bytes > 1 << 64:
            raise TransportError("the source's pool reaches beyond its address space")
        return region

    def check_lane(self, last_read_was_local: bool | None) -> None:
        """Refuse TCP where it is forbidden. Raises TransportError.

        On a busy machine a read over TCP, too, may be over when it is looked at.
        """
        if self._lanes.may_use_network:
            return
        tells = self._memory.memory_kind == "DRAM"  # of CUDA IPC the rate does: ``ways``
        if self._lanes.has_network_alone or (tells and last_read_was_local is False):
            raise TransportError(
                f"{self._library} would read over TCP: cross-memory attach does not reach the "
                "source (another machine, user or pid namespace, or ptrace is restricted)"
            )
