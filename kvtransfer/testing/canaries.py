"""Canaries: free blocks are painted, and looked at again and again, last as they are handed out.

For workers under test. Whoever writes into a block that nobody holds, such as a read
that was given up and lands late, changes one. Only a block that is freed and handed out
again between two looks was never painted. Event loop only.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from kvtransfer.memory import HostMemory

_INTERVAL_S = 0.02
_MAX_SHARE = 0.1  # of the event loop's time: a large pool is looked at less often


class FreeBlocks(Protocol):
    """What is known of a pool's blocks."""

    on_handed_out: Callable[[Sequence[int]], None] | None

    @property
    def num_blocks(self) -> int: ...
    def is_free(self, block_id: int) -> bool:
        """Whether nobody holds it, and it is no cached one."""
        ...

    def generation(self, block_id: int) -> int: ...


class Canaries:
    """Paints the free blocks of one pool and counts those that changed."""

    def __init__(self, pool: FreeBlocks, memory: HostMemory) -> None:
        self.num_checked = 0
        self.num_changed = 0
        self._pool = pool
        self._memory = memory
        self._painted: dict[int, int] = {}  # block -> its generation then
        pool.on_handed_out = self._handed_out

    @property
    def num_painted(self) -> int:
        return len(self._painted)

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            begun_s = time.monotonic()
            self.look()
            await asyncio.sleep(max(_INTERVAL_S, (time.monotonic() - begun_s) / _MAX_SHARE))

    def look(self) -> None:
        """Check the painted blocks that are still free; paint the others that are."""
        for block_id in self._free():
            generation = self._pool.generation(block_id)
            if self._painted.get(block_id) == generation:
                self._check(block_id)
            else:
                self._memory.block(block_id)[:] = self._pattern(block_id)
                self._painted[block_id] = generation

    def _handed_out(self, block_ids: Sequence[int]) -> None:
        """The last look at these: whoever holds them now may write next."""
        for block_id in block_ids:
            if self._painted.pop(block_id, None) == self._pool.generation(block_id):
                self._check(block_id)

    def _check(self, block_id: int) -> None:
        block, pattern = self._memory.block(block_id), self._pattern(block_id)
        self.num_checked += 1
        if bytes(block) != pattern:  # comparing views goes byte by byte
            self.num_changed += 1
            block[:] = pattern

    def _free(self) -> Iterable[int]:
        free = [b for b in range(self._pool.num_blocks) if self._pool.is_free(b)]
        for block_id in self._painted.keys() - free:
            del self._painted[block_id]
        return free

    def _pattern(self, block_id: int) -> bytes:
        return (0xC0FFEE00000000 + block_id).to_bytes(8, "little") * (
            self._memory.block_bytes // 8
        ) + b"\x5a" * (self._memory.block_bytes % 8)
