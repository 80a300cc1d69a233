"""Which worker has probably cached which prompt blocks: the router's own memory. Pure."""

from collections import OrderedDict
from collections.abc import Sequence


class PrefixMemory:
    """Least-recently-used block keys per worker incarnation.

    It may be wrong: workers evict without telling, and other routers fill them too. So
    of each worker no more is remembered than its own pool can hold.

    A block is known once one prompt with it was taken; until then it is only expected, by so
    many prompts that may yet be refused, and ends with the last of them.
    """

    def __init__(self, max_blocks: int) -> None:
        """``max_blocks`` per worker at the most, and of one whose pool is not known."""
        self._max_blocks = max_blocks
        self._limits: dict[str, int] = {}
        # By how many each block is expected; 0: it is known.
        self._by_worker: dict[str, OrderedDict[bytes, int]] = {}

    def resize(self, incarnation: str, num_blocks: int) -> None:
        """The worker's pool holds ``num_blocks``."""
        if self._limits.get(incarnation) != num_blocks:
            self._limits[incarnation] = num_blocks
            self._trim(incarnation)

    def remember(self, incarnation: str, block_keys: Sequence[bytes]) -> None:
        """Mark the blocks as known, the most recent ones of the worker."""
        keys = self._by_worker.setdefault(incarnation, OrderedDict())
        # The prompt's beginning is the most recent: a chain is useless without its root.
        for key in reversed(block_keys):
            keys[key] = 0
            keys.move_to_end(key)
        self._trim(incarnation)

    def expect(self, incarnation: str, block_keys: Sequence[bytes]) -> None:
        """As ``remember``, but of a worker that has yet to take the prompt, or not to."""
        keys = self._by_worker.setdefault(incarnation, OrderedDict())
        for key in reversed(block_keys):
            is_known = keys.get(key) == 0
            keys[key] = 0 if is_known else keys.get(key, 0) + 1
            keys.move_to_end(key)
        self._trim(incarnation)

    def retract(self, incarnation: str, block_keys: Sequence[bytes]) -> None:
        """One that expected these blocks does no more: what nobody else does is forgotten."""
        keys = self._by_worker.get(incarnation, OrderedDict())
        for key in block_keys:
            match keys.get(key):
                case None | 0:
                    pass
                case 1:
                    del keys[key]
                case num_expecting:
                    keys[key] = num_expecting - 1

    def holders(self, block_keys: Sequence[bytes]) -> set[str]:
        """The workers that probably have the first block: all others have none of the rest."""
        if not block_keys:
            return set()
        first = block_keys[0]
        return {worker for worker, keys in self._by_worker.items() if first in keys}

    def num_hit_blocks(self, incarnation: str, block_keys: Sequence[bytes]) -> int:
        """How many leading blocks the worker probably has."""
        keys = self._by_worker.get(incarnation)
        if not keys or not block_keys or block_keys[0] not in keys:
            return 0
        low, high = 1, len(block_keys)  # chained keys: having one implies having those before
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
        self._limits.pop(incarnation, None)

    def _trim(self, incarnation: str) -> None:
        keys = self._by_worker.get(incarnation, OrderedDict())
        limit = min(self._max_blocks, self._limits.get(incarnation, self._max_blocks))
        while len(keys) > limit:
            keys.popitem(last=False)
