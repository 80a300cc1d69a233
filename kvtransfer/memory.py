"""The pool of KV blocks as the transfer sees it: bytes at addresses, nothing else.

The bytes may lie on a device, which no pointer of the host reaches: so the transfer
looks into a pool only by what ``BlockMemory`` offers.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from diptych.errors import DeviceLostError
from diptych.word_sums import Sums
from kvtransfer.block_shares import BlockShare
from kvtransfer.digest import Coverage, block_digest, share_sums


class BlockMemory(Protocol):
    """All KV blocks of a worker, of equal size.

    Lives as long as the worker. Which block may be read or written when is not
    its business: leases and reservations say so.
    """

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
    def lost(self) -> DeviceLostError | None:
        """Set once its device cannot be used again: then this process has to end.

        Read on the event loop. The read, probe or digest that met it fails like any other.
        """
        ...

    def read(
        self, block_ids: Sequence[int], begin: int, end: int, num_bytes: int | None = None
    ) -> bytes:
        """A copy of bytes ``begin`` to ``end`` of these blocks, laid one after another.

        num_bytes: of each block no others than the first so many; here and in ``write``. On the
        transfer thread, like the two below. All raise IndexError beyond the pool, and
        DeviceLostError.
        """
        ...

    def write(
        self, block_ids: Sequence[int], offset: int, payload: bytes, num_bytes: int | None = None
    ) -> None:
        """Put ``payload`` into these blocks, from ``offset`` in the first of them on.

        The bytes are there for every later reader, the device's too, when it returns.
        """
        ...

    def digests(self, block_ids: Sequence[int], coverages: Sequence[Coverage]) -> tuple[bytes, ...]:
        """The digest of each block, of the bytes that its coverage says.

        What a read of the same blocks, from wherever, brought before is looked at as well.
        """
        ...


class PoolMemory(BlockMemory, Protocol):
    """Blocks in one place: contiguous, block ``i`` at ``base + i * block_bytes``."""

    @property
    def base_address(self) -> int: ...

    @property
    def shared_fd(self) -> int | None:
        """A file that is this memory, for another process to map; None where there is none."""
        ...


class RankPoolMemory(PoolMemory, Protocol):
    """One rank's pool: of each whole block its share."""

    def share_sums(
        self, block_ids: Sequence[int], coverages: Sequence[Coverage], share: BlockShare
    ) -> list[Sums]:
        """What it gives to the digests of these whole blocks.

        coverages: of those, each with how many of its bytes, whole stretches. Else as ``digests``.
        """
        ...


@runtime_checkable
class DeviceCopies(BlockMemory, Protocol):
    """Pools on devices: their blocks are copied to host memory and from there, beside their work.

    On the transfer thread. Whoever copies keeps both sides as they are until the copy is over:
    what was returned says whether it is, and is called until it says so. Both may raise
    DeviceLostError, or RuntimeError, of the device; then it is over as well. num_bytes: as
    for ``read``.
    """

    def new_staging(self, num_blocks: int) -> "HostMemory":
        """Blocks of the pool's size in host memory that the device reaches and a file is.

        They live as long as the pool. Raises OSError, ValueError, RuntimeError: not so much.
        """
        ...

    def copy_out(
        self,
        block_ids: Sequence[int],
        staging: "HostMemory",
        slots: Sequence[int],
        num_bytes: int | None = None,
    ) -> Callable[[], bool]:
        """Begin to copy blocks to staging blocks. What they hold has to be there."""
        ...

    def copy_in(
        self,
        staging: "HostMemory",
        slots: Sequence[int],
        block_ids: Sequence[int],
        num_bytes: int | None = None,
    ) -> Callable[[], bool]:
        """Begin to copy staging blocks to blocks: there for every later reader once it is over."""
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
    array of it). Keeps the buffer alive. ``block`` is not the transfer's: tests and what
    injects faults look into the pool with it.
    """

    memory_kind = "DRAM"
    device_id = 0
    lost: DeviceLostError | None = None  # the host is not lost while we run

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
        """Writable bytes of one block in place; raises IndexError beyond the pool."""
        if not 0 <= block_id < self.num_blocks:
            raise IndexError(f"block {block_id} of {self.num_blocks}")
        start = block_id * self.block_bytes
        return self._bytes[start : start + self.block_bytes]

    def read(
        self, block_ids: Sequence[int], begin: int, end: int, num_bytes: int | None = None
    ) -> bytes:
        size = num_bytes or self.block_bytes
        parts = []
        for index in range(begin // size, -(-end // size)):
            start = index * size
            block = self.block(block_ids[index])[:size]
            parts.append(block[max(begin - start, 0) : end - start])
        return b"".join(parts)

    def write(
        self, block_ids: Sequence[int], offset: int, payload: bytes, num_bytes: int | None = None
    ) -> None:
        size = num_bytes or self.block_bytes
        rest = memoryview(payload)
        for block_id in block_ids:
            block = self.block(block_id)
            part = rest[: size - offset]
            block[offset : offset + len(part)] = part
            rest, offset = rest[len(part) :], 0
        if rest:
            raise IndexError(f"{len(rest)} bytes too many for {len(block_ids)} blocks")

    def digests(self, block_ids: Sequence[int], coverages: Sequence[Coverage]) -> tuple[bytes, ...]:
        return tuple(
            block_digest(self.block(block_id), coverage)
            for block_id, coverage in zip(block_ids, coverages, strict=True)
        )

    def share_sums(
        self, block_ids: Sequence[int], coverages: Sequence[Coverage], share: BlockShare
    ) -> list[Sums]:
        return [
            share_sums(self.block(block_id), coverage, share)
            for block_id, coverage in zip(block_ids, coverages, strict=True)
        ]
