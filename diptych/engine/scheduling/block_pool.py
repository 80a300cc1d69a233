"""Who holds which KV block, and nothing else.

A *block* holds ``block_size`` token *slots* for every layer. The pool deals in
block ids; tensors live in :mod:`diptych.engine.kv.cache`. Pure and synchronous,
owned by the event loop's thread.

Every block counts its holders per :class:`Owner`. A block nobody holds is free,
or cached if it has a key (see :mod:`diptych.engine.scheduling.prefix_cache`); a cached
block is handed out again only when no free one is left. A block with a key, or
with two holders, is immutable: nobody writes into it.
"""

import enum
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from diptych.block_hash import BlockKey
from diptych.block_needs import BlockNeeds
from diptych.cache_log import CacheLog
from diptych.engine.scheduling.free_runs import FreeRuns
from diptych.engine.scheduling.prefix_cache import PrefixCache
from diptych.errors import RETRY_SOON_S, BlocksExhaustedError


class Owner(enum.IntEnum):
    """On whose behalf a block is held, in ascending precedence."""

    RUNNING = 0  # sequences in the batch or waiting for it
    RESERVED = 1  # sequences whose KV is to come
    LEASED = 2  # prefilled sequences, held for readers


class BlockCounts(NamedTuple):
    """Every block once; all but ``total`` sum to ``total``. Fields as on the wire."""

    total: int
    free: int
    cached: int
    running: int
    reserved: int
    leased: int
    quarantined: int


# A block's holders are one integer, a field of so many bits per owner and the
# quarantine on top: the highest field in use is its class, by precedence.
_BITS = 20
_MASK = (1 << _BITS) - 1
_UNIT = tuple(1 << (_BITS * place) for place in range(len(Owner)))
_UNITS = tuple(zip(Owner, _UNIT, strict=True))
_QUARANTINE = 1 << (_BITS * len(Owner))


class BlockPool:
    """All blocks of one KV cache. Invariant: see the module."""

    def __init__(self, num_blocks: int, block_size: int, needs: BlockNeeds | None = None) -> None:
        """needs: of its blocks; without it, all of each. Raises ValueError unless positive."""
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"need positive sizes, got {num_blocks=} {block_size=}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.needs = needs or BlockNeeds.whole(block_size)
        self.on_handed_out: Callable[[Sequence[int]], None] | None = None
        """Told of free blocks before their next holder may write; for who watches them."""
        self._holders = [0] * num_blocks
        self._generation = [0] * num_blocks
        self._num_of_class = [num_blocks] + [0] * (len(Owner) + 1)  # [0]: held by nobody
        self._free = FreeRuns(num_blocks)
        self._cache = PrefixCache(self.needs, num_blocks)

    @property
    def num_available_blocks(self) -> int:
        """Blocks that ``allocate`` could hand out now: free ones and cached ones."""
        return len(self._free) + self._cache.num_idle_blocks

    @property
    def cache_log(self) -> CacheLog:
        """Which keys are cached, for those who follow that."""
        return self._cache.log

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` slots need (ceiling division)."""
        return -(-num_tokens // self.block_size)

    def counts(self) -> BlockCounts:
        """Blocks by precedence quarantined > leased > reserved > running > cached > free."""
        _, running, reserved, leased, quarantined = self._num_of_class
        return BlockCounts(
            total=self.num_blocks,
            free=len(self._free),
            cached=self._cache.num_idle_blocks,
            running=running,
            reserved=reserved,
            leased=leased,
            quarantined=quarantined,
        )

    def generation(self, block_id: int) -> int:
        """How often the block was handed out for writing; grows by one each time."""
        return self._generation[block_id]

    def is_free(self, block_id: int) -> bool:
        """Whether nobody holds it, and it is no cached one."""
        return not self._holders[block_id] and block_id not in self._cache

    def holders(self, block_id: int) -> dict[Owner, int]:
        """How many hold the block, by owner; the quarantine is none of them."""
        held = self._holders[block_id]
        if not held:
            return {}
        return {owner: count for owner, unit in _UNITS if (count := held // unit & _MASK)}

    def is_quarantined(self, block_id: int) -> bool:
        """Whether a posted read may write it; for checks."""
        return self._holders[block_id] >= _QUARANTINE

    @property
    def quarantined(self) -> list[int]:
        """Blocks that posted reads may write; for checks. O(blocks)."""
        return [at for at, held in enumerate(self._holders) if held >= _QUARANTINE]

    @property
    def cached(self) -> Mapping[int, BlockKey]:
        """Those with a key, and theirs; for checks. A view."""
        return self._cache.keys

    def key_of(self, block_id: int) -> BlockKey | None:
        """The key under which it is cached, if it is."""
        return self._cache.key_of(block_id)

    def num_groups_of(self, block_id: int) -> int:
        """How many groups of layers a cached block holds, the first ones; for checks."""
        return self._cache.num_groups_of(block_id)

    def is_writable(self, block_id: int) -> bool:
        """Whether its one holder may write into it."""
        holders = self._holders[block_id]
        return holders in _UNIT and block_id not in self._cache

    def allocate(self, num_blocks: int, owner: Owner, after: int | None = None) -> list[int]:
        """Hand out blocks for writing, each with one holder of ``owner``; all or nothing.

        Prefers few ascending runs, and the one that follows block ``after``.
        Raises BlocksExhaustedError; the pool is then unchanged.
        """
        self.check_available(num_blocks)
        for _ in range(num_blocks - len(self._free)):
            self._free.add(self._cache.evict())
        block_ids = self._free.take(num_blocks, after)
        if self.on_handed_out is not None:
            self.on_handed_out(block_ids)
        for block_id in block_ids:
            self._generation[block_id] += 1
            self._holders[block_id] = _UNIT[owner]
        self._num_of_class[0] -= num_blocks
        self._num_of_class[owner + 1] += num_blocks
        return block_ids

    def check_available(
        self, num_blocks: int, held_hits: Iterable[int] = (), keep: int = 0
    ) -> None:
        """Raise BlocksExhaustedError unless so many could be allocated.

        Besides holding the cached blocks ``held_hits`` and leaving ``keep`` available.
        """
        available = self.num_available_blocks - keep
        available -= sum(not self._holders[block_id] for block_id in held_hits)
        if num_blocks > available:
            raise BlocksExhaustedError(
                f"need {num_blocks} KV blocks, {max(available, 0)} free",
                retry_after_s=RETRY_SOON_S,
                needed=str(num_blocks),
                free=str(max(available, 0)),
            )

    def free(self, block_ids: Sequence[int], owner: Owner) -> None:
        """Take one holder of ``owner`` from each block (in logical order).

        The last block of a table is the first to be evicted.
        """
        for block_id in reversed(block_ids):
            holders = self._holders[block_id]
            assert holders >> (_BITS * owner) & _MASK, f"block {block_id} is not held by {owner}"
            self._set_holders(block_id, holders - _UNIT[owner])

    def retag(self, block_ids: Iterable[int], old: Owner, new: Owner) -> None:
        """Turn one ``old`` holder of each block into a ``new`` one."""
        for block_id in block_ids:
            holders = self._holders[block_id]
            assert holders >> (_BITS * old) & _MASK, f"block {block_id} is not held by {old}"
            self._set_holders(block_id, holders - _UNIT[old] + _UNIT[new])

    def quarantine(self, block_ids: Collection[int]) -> None:
        """Keep held blocks from being handed out, whoever frees them: a posted read may write them.

        Idempotent per block.
        """
        for block_id in block_ids:
            holders = self._holders[block_id]
            assert holders, f"block {block_id} is quarantined and nobody held it"
            assert block_id not in self._cache, f"block {block_id} is cached and being written"
            if holders < _QUARANTINE:
                self._set_holders(block_id, holders + _QUARANTINE)

    def end_quarantine(self, block_ids: Collection[int]) -> None:
        """Their reads reached a terminal state. Blocks not in quarantine are ignored.

        The caller wakes the engine: somebody may wait for these blocks.
        """
        for block_id in block_ids:
            holders = self._holders[block_id]
            if holders >= _QUARANTINE:
                self._set_holders(block_id, holders - _QUARANTINE)

    def lookup(self, keys: Sequence[BlockKey], *, step_back: bool = False) -> list[int]:
        """See the prefix cache. Holds nothing, see ``hold``."""
        return self._cache.lookup(keys, step_back=step_back)

    def lookup_to_pull(self, keys: Sequence[BlockKey], last_block: int) -> list[int]:
        """See the prefix cache. Holds nothing."""
        return self._cache.lookup_to_pull(keys, last_block)

    def hold(self, block_ids: Sequence[int], owner: Owner) -> None:
        """Add one holder to each cached block, so that it stays."""
        for block_id in block_ids:
            assert block_id in self._cache, f"block {block_id} is not shared"
            self._set_holders(block_id, self._holders[block_id] + _UNIT[owner])

    def insert(
        self, block_id: int, key: BlockKey, parent: BlockKey | None, num_groups: int | None = None
    ) -> bool:
        """Enter a held block, of which so many groups are completely written; without: all.

        False if another block has that key: it stays, this one remains private. One that holds
        fewer groups gives the key up instead, and stays with its holders.
        """
        assert self.is_writable(block_id), f"block {block_id} is not its holder's to enter"
        num_groups = self.needs.num_groups if num_groups is None else num_groups
        replaced = self._cache.replaced_by(key, num_groups)
        if replaced is not None:
            self._cache.remove(replaced)
            if not self._holders[replaced]:
                self._free.add(replaced)
        return self._cache.insert(block_id, key, parent, num_groups)

    def forget(self, block_ids: Iterable[int]) -> set[int]:
        """Let nobody share these blocks, nor any computed from them, that does not already.

        They stay with their holders. Returns all that were cached until now.
        """
        forgotten = self._cache.forget(block_ids)
        for block_id in sorted(forgotten):
            if not self._holders[block_id]:
                self._free.add(block_id)
        return forgotten

    def _set_holders(self, block_id: int, holders: int) -> None:
        before = self._holders[block_id]
        self._holders[block_id] = holders
        self._num_of_class[_class_of(before)] -= 1
        self._num_of_class[_class_of(holders)] += 1
        if not holders:
            if block_id in self._cache:
                self._cache.mark_idle(block_id)
            else:
                self._free.add(block_id)
        elif not before:
            self._cache.mark_held(block_id)


def _class_of(holders: int) -> int:
    """0: nobody, then as Owner, then the quarantine."""
    return -(-holders.bit_length() // _BITS)
