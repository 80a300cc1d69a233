"""Which blocks hold KV that others may share, and which of them goes first.

A block enters under its key (:mod:`diptych.block_hash`) once its KV is complete
and stays until it is evicted. *Idle* blocks are those that nobody holds: only
they are evicted, leaves before their parents, least recently used first. Knows
no holders; the block pool, its owner, tells it. Pure.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from diptych.block_hash import BlockKey


class PrefixCache:
    """A one-to-one map of keys and block ids, with an order of eviction."""

    def __init__(self) -> None:
        self._block_of: dict[BlockKey, int] = {}
        self._key_of: dict[int, BlockKey] = {}
        self._parent_of: dict[int, BlockKey] = {}
        self._num_children: dict[BlockKey, int] = {}  # cached blocks by their parent's key
        self._idle: OrderedDict[int, None] = OrderedDict()  # oldest first

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._key_of

    @property
    def num_idle_blocks(self) -> int:
        return len(self._idle)

    def key_of(self, block_id: int) -> BlockKey | None:
        """The key of a cached block."""
        return self._key_of.get(block_id)

    def lookup(self, keys: Sequence[BlockKey]) -> list[int]:
        """Blocks of the longest cached prefix of ``keys``."""
        found = []
        for key in keys:
            block_id = self._block_of.get(key)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def insert(self, block_id: int, key: BlockKey, parent: BlockKey | None) -> bool:
        """Enter a block that somebody holds; False if the key is taken."""
        assert block_id not in self._key_of, "a cached block was written"
        if key in self._block_of:
            return False
        self._block_of[key] = block_id
        self._key_of[block_id] = key
        if parent is not None:
            self._parent_of[block_id] = parent
            self._num_children[parent] = self._num_children.get(parent, 0) + 1
        return True

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
                self._idle.pop(block_id, None)
                self._forget(block_id)
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

    def _forget(self, block_id: int) -> None:
        del self._block_of[self._key_of.pop(block_id)]
        parent = self._parent_of.pop(block_id, None)
        if parent is not None:
            self._num_children[parent] -= 1
            if not self._num_children[parent]:
                del self._num_children[parent]
