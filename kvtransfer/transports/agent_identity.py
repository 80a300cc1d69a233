"""What a worker's transport agents are made with, and how peers get to know them.

Facts that shape this: metadata is accepted by the library with flipped bits, so its
digest is checked first; nixl's reads over TCP can crash the process that is read, so
they are refused unless allowed. Which way the bytes go ("lane") cannot be asked.
Cross-memory attach copies inside nixl's ``transfer()``, so a warm read that is still in
progress when it returns went over a network. UCX refuses to start without TCP as the
carrier of its small messages on a machine without RDMA, so TCP cannot simply be
excluded there; with RDMA devices it is. ucxx has no such lane to lose: see ``agents.ucxx``.
"""

from diptych.v1 import kv_source_pb2
from kvtransfer.agents.base import AgentSettings, Region
from kvtransfer.config import TransferConfig
from kvtransfer.digest import descriptor_digest
from kvtransfer.errors import TransportError
from kvtransfer.memory import PoolMemory

_MEMORY_KINDS = ("DRAM", "VRAM")
# Of a source: 24 bytes of descriptor each in every reader's agent. 2 TB of blocks of 2 MiB.
_MAX_BLOCKS = 1 << 20


class AgentIdentity:
    """Names each life of a worker's agent: incarnation and epoch; describes it to peers."""

    def __init__(
        self, library: str, config: TransferConfig, incarnation: str, memory: PoolMemory
    ) -> None:
        tls = ucx_transports(library, config, memory.memory_kind)
        self.epoch = 0  # of the current life, or the last one
        self._may_use_network = (
            library == "ucxx" or config.allow_nixl_tcp or not {"tcp", "all"} & set(tls)
        )
        self._has_network_alone = set(tls) == {"tcp"}
        self._incarnation = incarnation
        self._ucx_tls = ",".join(tls)
        self._net_devices = config.ucx_net_devices
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

    def source_region(self, descriptor: kv_source_pb2.MemoryDescriptor) -> Region:
        """A source's pool as it described it. Raises TransportError: damaged, or not sound.

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
            raise TransportError(f"the source has memory of the kind {region.memory_kind!r}")
        if region.block_bytes != self._memory.block_bytes:
            raise TransportError(
                f"the source has blocks of {region.block_bytes} bytes, here are "
                f"{self._memory.block_bytes}"
            )
        if not 1 <= region.num_blocks <= _MAX_BLOCKS:
            raise TransportError(f"the source has {region.num_blocks} blocks")
        if region.base_address + region.num_blocks * region.block_bytes > 1 << 64:
            raise TransportError("the source's pool reaches beyond its address space")
        return region

    def check_lane(self, last_read_was_local: bool | None) -> None:
        """Refuse TCP where it is forbidden. Raises TransportError.

        On a busy machine a read over TCP, too, may be over when it is looked at.
        """
        if self._may_use_network:
            return
        if self._has_network_alone or last_read_was_local is False:
            raise TransportError(
                "nixl would read over TCP: cross-memory attach does not reach the source "
                "(another machine, user or pid namespace, or ptrace is restricted)"
            )


def ucx_transports(library: str, config: TransferConfig, memory_kind: str) -> tuple[str, ...]:
    """UCX_TLS for these settings: RDMA devices are named ``mlx5_0:1``, others have no colon."""
    if config.ucx_tls is not None:
        return config.ucx_tls
    rdma = config.uses_rdma
    names = ["rc", "dc", "ud"] if rdma else ["tcp"]
    if library == "ucxx":  # its messages do not go through cross-memory attach
        return tuple(names)
    names.insert(0, "cma")
    if rdma and config.allow_nixl_tcp:
        names.append("tcp")
    if memory_kind == "VRAM":
        names += ["cuda_copy", "cuda_ipc"]
    return tuple(names)
