"""A pool of blocks that the host cannot reach: what a GPU's looks like to the transfer."""

from collections.abc import Sequence

from kvtransfer.digest import Coverage
from kvtransfer.memory import HostMemory


class DeviceMemory:
    """PoolMemory whose bytes are copied in and out, or looked at where they are.

    It has no view of the host, no file to map, and an address that faults.
    """

    memory_kind = "VRAM"
    device_id = 0
    shared_fd = None
    lost = None
    base_address = 1 << 12

    def __init__(self, buffer: bytearray, block_bytes: int) -> None:
        self._bytes = HostMemory(buffer, block_bytes)
        self.block_bytes = block_bytes
        self.num_blocks = self._bytes.num_blocks

    def read(
        self, block_ids: Sequence[int], begin: int, end: int, num_bytes: int | None = None
    ) -> bytes:
        return self._bytes.read(block_ids, begin, end, num_bytes)

    def write(
        self, block_ids: Sequence[int], offset: int, payload: bytes, num_bytes: int | None = None
    ) -> None:
        self._bytes.write(block_ids, offset, payload, num_bytes)

    def digests(self, block_ids: Sequence[int], coverages: Sequence[Coverage]) -> tuple[bytes, ...]:
        return self._bytes.digests(block_ids, coverages)

    def block(self, block_id: int) -> memoryview:
        raise TypeError("blocks in device memory have no host view")
