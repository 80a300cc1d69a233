"""Gives sequences their blocks: prefix hits, fresh ones, and entering what was computed.

The scheduler decides when; this decides which. Changes ``block_table``,
``block_keys``, ``packed_table``, ``is_private`` and ``num_computed_tokens`` of sequences
and nothing else of them. Pure.
"""

from array import array
from collections.abc import Callable

from diptych.block_hash import BlockKey, extend_block_keys
from diptych.engine.scheduling.block_pool import BlockPool, Owner
from diptych.engine.scheduling.sequence import Sequence


class BlockTables:
    """Block tables over one pool. No sequence is longer than ``max_model_len`` tokens."""

    def __init__(self, pool: BlockPool, *, headroom_blocks: int, max_model_len: int) -> None:
        self._pool = pool
        self._headroom_blocks = headroom_blocks
        self._max_model_len = max_model_len

    def num_wanted_blocks(self, seq: Sequence) -> int:
        """Blocks of a sequence when it is admitted: its tokens and headroom, if it will grow."""
        needed = self._pool.num_blocks_for(seq.num_tokens)
        if seq.prefill_only:
            return needed
        longest = min(self._max_model_len, seq.num_prompt_tokens + seq.sampling.max_tokens)
        # The last token is sampled, never computed.
        at_last = self._pool.num_blocks_for(longest - 1)
        return max(needed, min(needed + self._headroom_blocks, at_last))

    def admit(
        self,
        seq: Sequence,
        owner: Owner,
        *,
        max_cached_tokens: int,
        keep: int = 0,
        to_pull: bool = False,
    ) -> int:
        """Fill an empty table, leaving ``keep`` blocks available for others.

        The first ``num_computed_tokens`` (returned) are a prefix hit of whole blocks, at
        most ``max_cached_tokens``; ``to_pull``: it need serve only once what it lacks was
        pulled. Raises BlocksExhaustedError; nothing has changed then.
        """
        assert not seq.block_table, "the sequence has blocks"
        pool = self._pool
        keys = self._keys(seq)[: max_cached_tokens // pool.block_size]
        if to_pull:
            hits = pool.lookup_to_pull(keys, (seq.num_tokens - 1) // pool.block_size)
        else:
            hits = pool.lookup(keys, step_back=len(keys) * pool.block_size == seq.num_tokens)
        num_fresh = self.num_wanted_blocks(seq) - len(hits)
        pool.check_available(num_fresh, hits, keep)
        pool.hold(hits, owner)
        fresh = pool.allocate(num_fresh, owner, after=hits[-1] if hits else None)
        seq.block_table += hits + fresh
        seq.num_computed_tokens = len(hits) * pool.block_size
        return seq.num_computed_tokens

    def refresh(self, seq: Sequence, owner: Owner) -> None:
        """Use what others entered since: swap own blocks to be computed for cached ones.

        The last token stays to be computed, for its logits.
        """
        pool, table = self._pool, seq.block_table
        missing = self.missing_blocks(seq)
        hits = pool.lookup(self._keys(seq)[missing.start : missing.stop])
        if not hits:
            return
        first = missing.start
        swapped = slice(first, first + len(hits))
        pool.hold(hits, owner)
        pool.free(table[swapped], owner)
        table[swapped] = hits
        seq.packed_table = None
        seq.num_computed_tokens += len(hits) * pool.block_size

    def grow(self, seq: Sequence, owner: Owner) -> None:
        """Let the table cover all tokens that are planned.

        Raises BlocksExhaustedError; nothing has changed then.
        """
        table = seq.block_table
        missing = self._pool.num_blocks_for(seq.num_planned_tokens) - len(table)
        if missing > 0:
            table += self._pool.allocate(missing, owner, after=table[-1] if table else None)

    def step_back(self, seq: Sequence, owner: Owner) -> None:
        """Leave the last token of a wholly computed sequence to be computed again.

        If its block is shared, the whole block, in another one. The table may then be
        one short.
        """
        block_size = self._pool.block_size
        index = (seq.num_tokens - 1) // block_size
        block_id = seq.block_table[index]
        if self._pool.is_writable(block_id):
            seq.num_computed_tokens = seq.num_tokens - 1
            return
        del seq.block_table[index]
        seq.packed_table = None
        self._pool.free([block_id], owner)
        seq.num_computed_tokens = index * block_size

    def drop(self, seq: Sequence, owner: Owner) -> None:
        """Empty the table; what was entered stays cached until it is evicted."""
        self._pool.free(seq.block_table, owner)
        seq.block_table.clear()
        seq.packed_table = None
        seq.num_computed_tokens = 0
        seq.is_private = False

    def enter_computed(self, seq: Sequence, first_token: int, end_token: int) -> None:
        """Enter the blocks that tokens from ``first_token`` to ``end_token`` completed."""
        num_groups = self._pool.needs.num_groups
        self._enter(seq, first_token, end_token, lambda index: num_groups)

    def enter_pulled(self, seq: Sequence) -> None:
        """Enter the whole blocks behind ``num_computed_tokens``, all of which were pulled.

        Of each came what the sequence needs of it; where that is not all, the rest is a hole.
        """
        last_block = (seq.num_tokens - 1) // self._pool.block_size
        num_groups_of = self._pool.needs.num_groups_of
        self._enter(
            seq,
            seq.num_computed_tokens,
            seq.num_tokens,
            lambda index: num_groups_of(index, last_block),
        )

    def missing_blocks(self, seq: Sequence) -> range:
        """Whole blocks that are still to be computed and that others could share.

        Empty where one is begun, or the table stays; without that of the last token, and those to
        be reported on.
        """
        first, past = divmod(seq.num_computed_tokens, self._pool.block_size)
        if past or seq.has_fixed_table:
            return range(first, first)
        return range(first, seq.num_shareable_tokens // self._pool.block_size)

    def will_enter(self, seq: Sequence, end_token: int, like: Sequence, index: int) -> bool:
        """Whether computing ``seq`` to ``end_token`` enters block ``index``, ``like``'s as well."""
        block_size = self._pool.block_size
        if not seq.num_computed_tokens // block_size <= index < end_token // block_size:
            return False
        return not seq.is_private and self._keys(seq)[index] == self._keys(like)[index]

    def distrust(self, seq: Sequence) -> set[int]:
        """Share nothing of a sequence from now on, hits included; what was shared until now."""
        return self._pool.forget(seq.block_table) | set(seq.block_table)

    def packed(self, seq: Sequence) -> "array[int]":
        """The table for a plan. Never changed afterwards; only new ids are looked at."""
        packed, table = seq.packed_table, seq.block_table
        if packed is None:
            packed = array("q", table)
        elif len(packed) < len(table):
            packed = packed + array("q", table[len(packed) :])
        seq.packed_table = packed
        return packed

    def _enter(
        self, seq: Sequence, first_token: int, end_token: int, num_groups: Callable[[int], int]
    ) -> None:
        """num_groups: that a block holds, by its index in the sequence."""
        block_size = self._pool.block_size
        first, end = first_token // block_size, end_token // block_size
        if first == end or seq.is_private:
            return
        keys = self._keys(seq)
        for index in range(first, end):
            parent = keys[index - 1] if index else None
            self._pool.insert(seq.block_table[index], keys[index], parent, num_groups(index))

    def _keys(self, seq: Sequence) -> list[BlockKey]:
        extend_block_keys(seq.block_keys, seq.token_ids, self._pool.block_size, seq.cache_salt)
        return seq.block_keys
