"""Which blocks hold KV that others may share, and which of them goes first.

A block enters under its key (:mod:`diptych.block_hash`) once its KV is complete
and stays until it is evicted. *Idle* blocks are those that nobody holds: only
they are evicted, leaves before their parents, least recently used first. Knows
no holders; the block pool, its owner, tells it. Pure.

A block that was pulled may hold its first groups of layers alone, where its sequence needed
no more (:mod:`diptych.block_needs`): the rest is a hole, of any content.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from diptych.block_hash import BlockKey
from diptych.block_needs import BlockNeeds
from diptych.cache_log import CacheLog


class PrefixCache:
    """A one-to-one map of keys and block ids, with an order of eviction.

    ``log`` tells those who follow it which keys are in it, holes or not.
    """

    def __init__(self, needs: BlockNeeds, num_blocks: int) -> None:
        """``num_blocks`` at the most are ever cached."""
        self._needs = needs
        self._num_groups_of: dict[int, int] = {}  # of each block, the first ones; others are holes
        self._block_of: dict[BlockKey, int] = {}
        self._key_of: dict[int, BlockKey] = {}
        self._parent_of: dict[int, BlockKey] = {}
        self._num_children: dict[BlockKey, int] = {}  # cached blocks by their parent's key
        self._idle: OrderedDict[int, None] = OrderedDict()  # oldest first
        self.log = CacheLog(self._block_of.keys(), num_blocks)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._key_of

    @property
    def num_idle_blocks(self) -> int:
        return len(self._idle)

    @property
    def keys(self) -> Mapping[int, BlockKey]:
        """Of all cached blocks. A view."""
        return self._key_of

    def key_of(self, block_id: int) -> BlockKey | None:
        """The key of a cached block."""
        return self._key_of.get(block_id)

    def num_groups_of(self, block_id: int) -> int:
        """How many groups of layers a cached block holds, the first ones."""
        return self._num_groups_of[block_id]

    def lookup(self, keys: Sequence[BlockKey], *, step_back: bool = False) -> list[int]:
        """Blocks of the longest cached prefix of ``keys`` behind which a sequence can go on.

        With the next block's tokens; ``step_back``: where all of them are found, with those of
        the last one, too, for it may be computed once more.
        """
        found = []
        for key in keys:
            block_id = self._block_of.get(key)
            if block_id is None:
                break
            found.append(block_id)
        if not self._needs.reaches:
            return found
        return found[: self._num_usable(found, step_back=step_back and len(found) == len(keys))]

    def lookup_to_pull(self, keys: Sequence[BlockKey], last_block: int) -> list[int]:
        """Blocks of the longest cached prefix behind which the rest of a sequence can be pulled.

        Each holds what the sequence needs of it to go on once that is there; ``last_block`` is
        the sequence's. Never shorter than what ``lookup`` finds, but of no use by itself.
        """
        found = []
        for index, key in enumerate(keys):
            block_id = self._block_of.get(key)
            needed = self._needs.num_groups_of(index, last_block)
            if block_id is None or self._num_groups_of[block_id] < needed:
                break
            found.append(block_id)
        return found

    def replaced_by(self, key: BlockKey, num_groups: int) -> int | None:
        """The block that has the key now, if it holds less than so many groups."""
        block_id = self._block_of.get(key)
        if block_id is None or self._num_groups_of[block_id] >= num_groups:
            return None
        return block_id

    def insert(
        self, block_id: int, key: BlockKey, parent: BlockKey | None, num_groups: int
    ) -> bool:
        """Enter a block that somebody holds, and that holds so many groups.

        False if the key is taken.
        """
        assert block_id not in self._key_of, "a cached block was written"
        if key in self._block_of:
            return False
        self._block_of[key] = block_id
        self._key_of[block_id] = key
        self._num_groups_of[block_id] = num_groups
        self.log.entered(key)
        if parent is not None:
            self._parent_of[block_id] = parent
            self._num_children[parent] = self._num_children.get(parent, 0) + 1
        return True

    def remove(self, block_id: int) -> None:
        """Take a block's key, and of no other; if it was idle, it is nobody's now."""
        self._idle.pop(block_id, None)
        self._forget(block_id)

    def forget(self, block_ids: Iterable[int]) -> set[int]:
        """Take the keys of these blocks, and of all that were computed from them.

        Returns the blocks that lost theirs: those that were idle are nobody's now.
        O(cached blocks): it is for what must never happen.
        """
        keys = {self._key_of[block_id] for block_id in block_ids if block_id in self._key_of}
        forgotten = set[int]()
        while keys:
            children = {
                self._key_of[block_id]
                for block_id, parent in self._parent_of.items()
                if parent in keys
            }
            for key in keys:
                block_id = self._block_of[key]
                forgotten.add(block_id)
                self.remove(block_id)
            keys = children - keys
        return forgotten

    def mark_idle(self, block_id: int) -> None:
        """Nobody holds it any more. Call in the order in which to evict: leaves first."""
        self._idle[block_id] = None

    def mark_held(self, block_id: int) -> None:
        """Somebody holds an idle block."""
        del self._idle[block_id]

    def evict(self) -> int:
        """Forget one idle block (there must be one) and return it."""
        for _ in range(len(self._idle)):
            block_id = next(iter(self._idle))
            if self._key_of[block_id] not in self._num_children:
                break
            # Its child was entered by somebody with a twin of this block, so the
            # order of use does not show that the child needs it.
            self._idle.move_to_end(block_id)
        else:
            block_id = next(iter(self._idle))  # all children are held: no leaf is idle
        del self._idle[block_id]
        self._forget(block_id)
        return block_id

    def _num_usable(self, block_ids: Sequence[int], *, step_back: bool) -> int:
        """How many of the first blocks of a sequence it may use: see ``lookup``."""
        reaches, num_full = self._needs.reaches, self._needs.num_full_groups
        whole = [0] * len(reaches)  # blocks in a row, up to here, that have the group
        num_usable = 0
        for num_blocks, block_id in enumerate(block_ids, 1):
            num_sliding = self._num_groups_of[block_id] - num_full
            whole = [num + 1 if i < num_sliding else 0 for i, num in enumerate(whole)]
            more = step_back and num_blocks == len(block_ids)
            if all(
                num >= min(num_blocks, reach + more)
                for num, reach in zip(whole, reaches, strict=True)
            ):
                num_usable = num_blocks
        return num_usable

    def _forget(self, block_id: int) -> None:
        key = self._key_of.pop(block_id)
        del self._block_of[key], self._num_groups_of[block_id]
        self.log.left(key)
        parent = self._parent_of.pop(block_id, None)
        if parent is not None:
            self._num_children[parent] -= 1
            if not self._num_children[parent]:
                del self._num_children[parent]
