"""What entered and left one prefix cache, so that others can follow it. Pure.

The cache, which owns the log, notes each key; who follows asks for what came since. The log is
bounded: one that is too far behind gets all keys instead, which are no more than the log keeps.
"""

from collections import deque
from collections.abc import Collection, Iterator
from itertools import islice
from typing import NamedTuple

from diptych.block_hash import BlockKey
from diptych.cache_change import CacheChange, fold

_PART_KEYS = 4096  # of one change, each way: 128 KiB on the wire


class _Noted(NamedTuple):
    key: BlockKey
    has_entered: bool  # or left


class CacheLog:
    """The last changes of one cache, some 120 bytes each. Of one key they alternate."""

    def __init__(self, keys: Collection[BlockKey], max_changes: int) -> None:
        """``keys`` are those in the cache, always as they are now."""
        self.seq = 0  # keys that ever entered or left
        self._keys = keys
        self._digest = 0  # of the keys, as :func:`diptych.cache_change.fold` has it
        self._noted: deque[_Noted] = deque(maxlen=max_changes)  # newest last

    def entered(self, key: BlockKey) -> None:
        """The key is in the cache, and was not."""
        self._note(_Noted(key, True))

    def left(self, key: BlockKey) -> None:
        """The key was in the cache, and is not any more."""
        self._note(_Noted(key, False))

    def since(self, seq: int | None) -> Iterator[CacheChange]:
        """What brings one who is at ``seq`` to now, in order: one change at the least.

        Now is when this is called; each is made when it is taken, so that a large cache is
        told without a long pause. All keys for None, and for a moment that the log does not
        reach back to, or never was.
        """
        num_behind = None if seq is None else self.seq - seq
        if seq is None or num_behind is None or not 0 <= num_behind <= len(self._noted):
            return _in_parts(CacheChange(0, self.seq, (), tuple(self._keys), 0, 0, is_reset=True))
        differing: dict[BlockKey, bool] = {}
        for key, has_entered in islice(reversed(self._noted), num_behind):
            if differing.pop(key, None) is None:  # else the two undo each other
                differing[key] = has_entered
        removed = tuple(key for key, has_entered in differing.items() if not has_entered)
        added = tuple(key for key, has_entered in differing.items() if has_entered)
        num_before = len(self._keys) - len(added) + len(removed)
        digest_before = self._digest ^ fold(differing)
        return _in_parts(CacheChange(seq, self.seq, removed, added, num_before, digest_before))

    def _note(self, noted: _Noted) -> None:
        self.seq += 1
        self._digest ^= fold((noted.key,))
        self._noted.append(noted)


def _in_parts(whole: CacheChange) -> Iterator[CacheChange]:
    """In messages of a bounded size; ``whole`` says what there was before it."""
    from_seq, num_blocks, digest = whole.from_seq, whole.num_blocks, whole.digest
    num_keys = max(len(whole.removed), len(whole.added), 1)
    for first in range(0, num_keys, _PART_KEYS):
        removed = whole.removed[first : first + _PART_KEYS]
        added = whole.added[first : first + _PART_KEYS]
        num_blocks += len(added) - len(removed)
        digest ^= fold(removed) ^ fold(added)
        yield CacheChange(
            from_seq,
            whole.to_seq,
            removed,
            added,
            num_blocks,
            digest,
            is_reset=whole.is_reset and not first,
            has_more=first + _PART_KEYS < num_keys,
        )
        from_seq = whole.to_seq
