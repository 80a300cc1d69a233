"""The scratch blocks that readers' probes are served from, and the queue for them."""

import asyncio
from collections.abc import Sequence

from diptych.errors import RETRY_LATER_S, BlocksExhaustedError
from kvtransfer.memory import ScratchBlocks

MAX_WAITING = 4096  # probes; far more readers than one source has


class ProbeBlocks:
    """Lends scratch blocks to probes, in the order in which they ask. Event loop only.

    A source that restarts is probed by all of its readers at once: each waits for its
    turn, a few milliseconds times those before it, rather than to be refused and to come
    again after a growing pause. Who leaves while it waits takes nothing.
    """

    def __init__(self, scratch: ScratchBlocks) -> None:
        self._scratch = scratch
        self._turn = asyncio.Lock()  # first come, first served
        self._freed = asyncio.Event()
        self._num_waiting = 0
        self._num_lent = 0

    async def take(self, num_blocks: int) -> tuple[int, ...]:
        """Wait for ``num_blocks`` blocks; ``give_back`` has to follow.

        Raises BlocksExhaustedError: there are not so many, or too many wait.
        """
        if self._num_waiting >= MAX_WAITING:
            raise BlocksExhaustedError(f"{MAX_WAITING} probes wait", retry_after_s=RETRY_LATER_S)
        self._num_waiting += 1
        try:
            async with self._turn:
                return await self._first(num_blocks)
        finally:
            self._num_waiting -= 1

    def give_back(self, block_ids: Sequence[int]) -> None:
        """Nothing reads or writes them any more."""
        self._scratch.free(block_ids)
        self._num_lent -= len(block_ids)
        self._freed.set()

    async def _first(self, num_blocks: int) -> tuple[int, ...]:
        """Take them; nobody else does before."""
        while True:
            try:
                block_ids = tuple(self._scratch.allocate(num_blocks))
            except BlocksExhaustedError:
                if not self._num_lent:  # nothing will be given back
                    raise
                self._freed.clear()
                await self._freed.wait()
            else:
                self._num_lent += num_blocks
                return block_ids
