"""A pool of blocks that the host cannot reach: what a GPU's looks like to the transfer."""

from collections.abc import Callable, Sequence

from diptych.engine.kv.shared_bytes import SharedBytes
from kvtransfer.digest import Coverage
from kvtransfer.memory import HostMemory


class DeviceMemory:
    """DeviceCopies whose bytes are copied in and out, or looked at where they are.

    It has no view of the host, no file to map, and an address that faults. Copies to and from
    staging blocks move their bytes when they end, at the third question or, where ``is_held``,
    not before that is over.
    """

    memory_kind = "VRAM"
    device_id = 0
    shared_fd = None
    lost = None
    base_address = 1 << 12

    def __init__(self, buffer: bytearray, block_bytes: int) -> None:
        self._bytes = HostMemory(buffer, block_bytes)
        self._shared: list[SharedBytes] = []
        self.block_bytes = block_bytes
        self.num_blocks = self._bytes.num_blocks
        self.is_held = False
        self.num_copying = 0  # staging blocks, by copies that have not ended
        self.most_copying = 0
        self.num_copied = 0  # blocks, by those that have
        self.flips: set[int] = set()  # blocks of which a copy spoils a bit

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

    def new_staging(self, num_blocks: int) -> HostMemory:
        shared = SharedBytes(num_blocks * self.block_bytes)
        self._shared.append(shared)
        return HostMemory(shared.buffer, self.block_bytes, shared.fd)

    def copy_out(
        self,
        block_ids: Sequence[int],
        staging: HostMemory,
        slots: Sequence[int],
        num_bytes: int | None = None,
    ) -> Callable[[], bool]:
        return self._later(self._bytes, block_ids, staging, slots, num_bytes)

    def copy_in(
        self,
        staging: HostMemory,
        slots: Sequence[int],
        block_ids: Sequence[int],
        num_bytes: int | None = None,
    ) -> Callable[[], bool]:
        return self._later(staging, slots, self._bytes, block_ids, num_bytes)

    def _later(
        self,
        source: HostMemory,
        source_ids: Sequence[int],
        target: HostMemory,
        target_ids: Sequence[int],
        num_bytes: int | None,
    ) -> Callable[[], bool]:
        """Each block is moved when the copy ends: what was there then, nothing before."""
        pairs = list(zip(source_ids, target_ids, strict=True))
        size = num_bytes or self.block_bytes
        num_asked = 0
        self.num_copying += len(pairs)
        self.most_copying = max(self.most_copying, self.num_copying)

        def is_over() -> bool:
            nonlocal num_asked
            num_asked += 1
            if self.is_held or num_asked < 3:
                return False
            for source_id, target_id in pairs:
                moved = bytearray(source.block(source_id)[:size])
                if target is self._bytes and target_id in self.flips:
                    moved[-1] ^= 1
                target.block(target_id)[:size] = moved
            self.num_copying -= len(pairs)
            self.num_copied += len(pairs)
            return True

        return is_over
