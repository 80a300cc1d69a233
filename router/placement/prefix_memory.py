"""Which worker has probably cached which prompt blocks: the router's own memory. Pure."""

from collections import OrderedDict
from collections.abc import Sequence


class PrefixMemory:
    """Least-recently-used block keys per worker incarnation.

    It may be wrong (workers evict); only load balance depends on it.
    """

    def __init__(self, max_blocks: int) -> None:
        """``max_blocks`` per worker."""
        self._max_blocks = max_blocks
        self._by_worker: dict[str, OrderedDict[bytes, None]] = {}

    def remember(self, incarnation: str, block_keys: Sequence[bytes]) -> None:
        """Mark the blocks as the most recent ones of the worker."""
        keys = self._by_worker.setdefault(incarnation, OrderedDict())
        # The prompt's beginning is the most recent: a chain is useless without its root.
        for key in reversed(block_keys):
            keys[key] = None
            keys.move_to_end(key)
        while len(keys) > self._max_blocks:
            keys.popitem(last=False)

    def num_hit_blocks(self, incarnation: str, block_keys: Sequence[bytes]) -> int:
        """How many leading blocks the worker probably has."""
        keys = self._by_worker.get(incarnation)
        if not keys:
            return 0
        low, high = 0, len(block_keys)  # chained keys: having one implies having those before
        while low < high:
            middle = (low + high + 1) // 2
            if block_keys[middle - 1] in keys:
                low = middle
            else:
                high = middle - 1
        return low

    def correct(
        self, incarnation: str, block_keys: Sequence[bytes], num_cached_blocks: int
    ) -> None:
        """The worker says that it has only the first ``num_cached_blocks`` of these."""
        keys = self._by_worker.get(incarnation)
        if keys:
            for key in block_keys[num_cached_blocks:]:
                keys.pop(key, None)

    def forget(self, incarnation: str) -> None:
        """The worker is gone."""
        self._by_worker.pop(incarnation, None)
