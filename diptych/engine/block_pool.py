"""Who holds which KV block, and nothing else.

A *block* holds ``block_size`` token *slots* for every layer. The pool deals in
block ids; tensors live in :mod:`diptych.engine.kv_cache`. Pure and synchronous,
owned by the event loop's thread.

Every block counts its holders per :class:`Owner`. A block nobody holds is free,
or cached if it has a key (see :mod:`diptych.engine.prefix_cache`); a cached
block is handed out again only when no free one is left. A block with a key, or
with two holders, is immutable: nobody writes into it.
"""

import enum
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from diptych.block_hash import BlockKey


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


class BlockPool:
    """All blocks of one KV cache. Invariant: see the module."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """Raises ValueError unless both are positive."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        raise NotImplementedError

    @property
    def num_available_blocks(self) -> int:
        """Blocks that ``allocate`` could hand out now: free ones and cached ones."""
        raise NotImplementedError

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` slots need (ceiling division)."""
        return -(-num_tokens // self.block_size)

    def counts(self) -> BlockCounts:
        """Blocks by precedence quarantined > leased > reserved > running > cached > free."""
        raise NotImplementedError

    def generation(self, block_id: int) -> int:
        """How often the block was handed out for writing; grows by one each time."""
        raise NotImplementedError

    def allocate(self, num_blocks: int, owner: Owner, after: int | None = None) -> list[int]:
        """Hand out blocks for writing, each with one holder of ``owner``; all or nothing.

        Prefers few ascending runs, and the one that follows block ``after``.
        Raises BlocksExhaustedError; the pool is then unchanged.
        """
        raise NotImplementedError

    def free(self, block_ids: Sequence[int], owner: Owner) -> None:
        """Take one holder of ``owner`` from each block (in logical order).

        The last block of a table is the first to be evicted.
        """
        raise NotImplementedError

    def retag(self, block_ids: Iterable[int], old: Owner, new: Owner) -> None:
        """Turn one ``old`` holder of each block into a ``new`` one."""
        raise NotImplementedError

    def quarantine(self, block_ids: Collection[int]) -> None:
        """Keep blocks from being handed out, whoever frees them: a posted read may write them.

        Idempotent per block.
        """
        raise NotImplementedError

    def end_quarantine(self, block_ids: Collection[int]) -> None:
        """Their reads reached a terminal state. Blocks not in quarantine are ignored.

        The caller wakes the engine: somebody may wait for these blocks.
        """
        raise NotImplementedError

    def lookup(self, keys: Sequence[BlockKey]) -> list[int]:
        """The cached blocks of the longest prefix of ``keys``. Holds nothing, see ``hold``."""
        raise NotImplementedError

    def hold(self, block_ids: Sequence[int], owner: Owner) -> None:
        """Add one holder to each block that is held or cached, so that it stays."""
        raise NotImplementedError

    def insert(self, block_id: int, key: BlockKey, parent: BlockKey | None) -> bool:
        """Enter a held, completely written block into the prefix cache.

        False if another block has that key: it stays, this one remains private.
        """
        raise NotImplementedError
