"""The pool of KV blocks as the transfer sees it: bytes at addresses, nothing else."""

import ctypes
from collections.abc import Sequence
from typing import Protocol

from kvtransfer.digest import Coverage, block_digest


class PoolMemory(Protocol):
    """All KV blocks of a worker: equal size, contiguous, block ``i`` at ``base + i * block_bytes``.

    Lives as long as the worker. Which block may be read or written when is not
    its business: leases and reservations say so.
    """

    @property
    def base_address(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def memory_kind(self) -> str:
        """DRAM or VRAM."""
        ...

    @property
    def device_id(self) -> int: ...

    @property
    def shared_fd(self) -> int | None:
        """A file that is this memory, for another process to map; None where there is none."""
        ...

    def block(self, block_id: int) -> memoryview:
        """Writable bytes of one block (DRAM only). Called on the transfer thread."""
        ...


class ScratchBlocks(Protocol):
    """Lends blocks of the pool for probes. Called on the event loop."""

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks nobody else writes. Raises BlocksExhaustedError."""
        ...

    def free(self, block_ids: Sequence[int]) -> None: ...


class HostMemory:
    """PoolMemory over a writable, contiguous buffer in host memory.

    For a torch tensor pass ``tensor.view(torch.uint8).numpy()`` (or any numpy
    array of it). Keeps the buffer alive.
    """

    memory_kind = "DRAM"
    device_id = 0

    def __init__(
        self,
        buffer: "memoryview | bytearray | object",
        block_bytes: int,
        shared_fd: int | None = None,
    ) -> None:
        """``shared_fd``: of the file that ``buffer`` maps, if another process may map it too."""
        view = memoryview(buffer)  # type: ignore[arg-type]
        if view.readonly or not view.c_contiguous:
            raise ValueError("the pool must be writable and contiguous")
        self._bytes = view.cast("B")
        if block_bytes < 1 or self._bytes.nbytes % block_bytes:
            raise ValueError(f"{self._bytes.nbytes} bytes are not whole blocks of {block_bytes}")
        self.block_bytes = block_bytes
        self.shared_fd = shared_fd
        self.num_blocks = self._bytes.nbytes // block_bytes
        self.base_address = ctypes.addressof(ctypes.c_char.from_buffer(self._bytes))

    def block(self, block_id: int) -> memoryview:
        """Bytes of one block; raises IndexError beyond the pool."""
        if not 0 <= block_id < self.num_blocks:
            raise IndexError(f"block {block_id} of {self.num_blocks}")
        start = block_id * self.block_bytes
        return self._bytes[start : start + self.block_bytes]


def block_digests(
    memory: PoolMemory, block_ids: Sequence[int], seed: int = 0, first_place: int = 0
) -> tuple[bytes, ...]:
    """Digest of each block (transfer thread).

    ``seed`` as in Coverage; ``first_place`` is the place of the first of them in its sequence.
    """
    return tuple(
        block_digest(memory.block(block_id), Coverage(seed, place))
        for place, block_id in enumerate(block_ids, first_place)
    )
