"""The KV blocks behind those of the pool, for the transfer's probes. Event loop only."""

from collections import deque
from collections.abc import Iterable, Sequence

from diptych.errors import RETRY_SOON_S, BlocksExhaustedError


class PoolScratch:
    """Lends blocks that no sequence ever has, so that probes need no room in the pool.

    The block pool does not know them, and its counts leave them out.
    """

    def __init__(self, block_ids: Iterable[int]) -> None:
        self._free = deque(block_ids)
        self._lent: set[int] = set()

    @property
    def num_lent(self) -> int:
        """Blocks that a probe holds, or a read that its probe gave up; for checks."""
        return len(self._lent)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks nobody else writes. Raises BlocksExhaustedError; nothing is taken then."""
        if num_blocks > len(self._free):
            raise BlocksExhaustedError(
                f"need {num_blocks} scratch blocks, {len(self._free)} free",
                retry_after_s=RETRY_SOON_S,
                needed=str(num_blocks),
                free=str(len(self._free)),
            )
        block_ids = [self._free.popleft() for _ in range(num_blocks)]
        self._lent.update(block_ids)
        return block_ids

    def free(self, block_ids: Sequence[int]) -> None:
        """Give them back."""
        assert self._lent.issuperset(block_ids), f"not all of {block_ids} are lent"
        self._lent.difference_update(block_ids)
        self._free.extend(block_ids)
