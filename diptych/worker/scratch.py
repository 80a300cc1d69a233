"""Lends blocks of the pool to the transfer's probes. Event loop only."""

from collections.abc import Callable, Sequence

from diptych.engine.block_pool import BlockPool, Owner


class PoolScratch:
    """Blocks that no sequence owns, counted as reserved while they are lent.

    ``on_free`` is called after blocks came back: somebody may wait for them.
    """

    def __init__(self, pool: BlockPool, on_free: Callable[[], None]) -> None:
        self._pool = pool
        self._on_free = on_free
        self.lent: set[int] = set()

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks nobody else writes. Raises BlocksExhaustedError."""
        block_ids = self._pool.allocate(num_blocks, Owner.RESERVED)
        self.lent.update(block_ids)
        return block_ids

    def free(self, block_ids: Sequence[int]) -> None:
        """Give them back."""
        self.lent.difference_update(block_ids)
        self._pool.free(block_ids, Owner.RESERVED)
        self._on_free()
