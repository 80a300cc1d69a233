"""What became other in a worker's prefix cache: told on ``WatchCache``, kept by routers. Pure."""

import struct
from collections.abc import Iterable
from functools import reduce
from operator import xor
from typing import NamedTuple

from diptych.block_hash import KEY_BYTES, BlockKey
from diptych.v1 import cache_pb2


class CacheChange(NamedTuple):
    """The keys that left and entered between two moments of one cache, no key in both.

    Moments are counted in keys that ever entered or left. Who has what the cache held at
    ``from_seq`` has ``num_blocks`` keys afterwards, which fold to ``digest``; else something
    was lost between the two.
    """

    from_seq: int
    to_seq: int
    removed: tuple[BlockKey, ...]
    added: tuple[BlockKey, ...]
    num_blocks: int
    digest: int
    is_reset: bool = False  # what was had before is to be dropped first, wherever it stood
    has_more: bool = False  # others follow to the same moment

    def to_proto(self, incarnation: str) -> cache_pb2.CacheChange:
        """As told by the process of that name."""
        return cache_pb2.CacheChange(
            incarnation=incarnation,
            reset=self.is_reset,
            from_seq=self.from_seq,
            to_seq=self.to_seq,
            removed=b"".join(self.removed),
            added=b"".join(self.added),
            num_blocks=self.num_blocks,
            digest=self.digest,
            has_more=self.has_more,
        )

    @classmethod
    def from_proto(cls, told: cache_pb2.CacheChange) -> "CacheChange":
        """What a worker told. Raises ValueError: not whole keys."""
        return cls(
            told.from_seq,
            told.to_seq,
            _keys("removed", told.removed),
            _keys("added", told.added),
            told.num_blocks,
            told.digest,
            told.reset,
            told.has_more,
        )


def fold(keys: Iterable[BlockKey]) -> int:
    """The exclusive or of the keys' halves: of a set, whatever its order."""
    packed = b"".join(keys)
    return reduce(xor, struct.unpack(f"<{len(packed) // 8}Q", packed), 0)


def _keys(field: str, packed: bytes) -> tuple[BlockKey, ...]:
    if len(packed) % KEY_BYTES:
        raise ValueError(f"{field}: {len(packed)} bytes are not keys of {KEY_BYTES}")
    ends = range(KEY_BYTES, len(packed) + 1, KEY_BYTES)
    return tuple(packed[end - KEY_BYTES : end] for end in ends)
