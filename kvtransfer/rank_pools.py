"""The pools of a worker's ranks as one: blocks are whole, whoever has which heads of them.

So leases, announcements, digests and messages are those of one rank; only what reads memory
directly (``transports.rank_transports``) knows that there are several pools.
"""

from collections.abc import Sequence

import numpy as np

from diptych.errors import ConfigurationError, DeviceLostError
from diptych.word_sums import total
from kvtransfer.block_shares import BlockShare
from kvtransfer.digest import LINE_BYTES, Coverage
from kvtransfer.memory import RankPoolMemory


class RankPools:
    """Implements ``BlockMemory``; the addresses are those of its ``parts``.

    The same block id names a block's part in each of them.
    """

    def __init__(self, parts: Sequence[RankPoolMemory], stretch_bytes: int) -> None:
        """parts: of the ranks in their order, equal in size. stretch_bytes: of a whole block.

        Raises ConfigurationError: digests need parts of whole lines.
        """
        self.parts = tuple(parts)
        size = len(parts)
        if stretch_bytes % (size * LINE_BYTES):
            raise ConfigurationError(
                f"tensor_parallel: {size} ranks cannot share the {stretch_bytes} bytes of a "
                f"layer's keys in a block: each needs a multiple of {LINE_BYTES}"
            )
        self.memory_kind, self.device_id = parts[0].memory_kind, parts[0].device_id
        self.num_blocks = parts[0].num_blocks
        self.block_bytes = size * parts[0].block_bytes
        self.shares = [BlockShare(rank, size, stretch_bytes // size) for rank in range(size)]
        self._stretch_bytes = stretch_bytes

    @property
    def lost(self) -> DeviceLostError | None:
        return next((part.lost for part in self.parts if part.lost is not None), None)

    def read(
        self, block_ids: Sequence[int], begin: int, end: int, num_bytes: int | None = None
    ) -> bytes:
        own_size = (num_bytes or self.block_bytes) // len(self.parts)
        lead = begin % self._stretch_bytes
        whole = self._stretches(lead + end - begin)
        for part, share, own in zip(self.parts, self.shares, whole.swapaxes(0, 1), strict=True):
            first, last = share.own_before(begin), share.own_before(end)
            got = np.frombuffer(part.read(block_ids, first, last, own_size), np.uint8)
            flat = np.zeros(own.size, np.uint8)
            flat[share.own_before(lead) :][: len(got)] = got
            own[:] = flat.reshape(own.shape)
        return whole.tobytes()[lead : lead + end - begin]

    def write(
        self, block_ids: Sequence[int], offset: int, payload: bytes, num_bytes: int | None = None
    ) -> None:
        own_size = (num_bytes or self.block_bytes) // len(self.parts)
        lead, end = offset % self._stretch_bytes, offset + len(payload)
        whole = self._stretches(lead + len(payload))
        whole.reshape(-1)[lead:][: len(payload)] = np.frombuffer(payload, np.uint8)
        for part, share, own in zip(self.parts, self.shares, whole.swapaxes(0, 1), strict=True):
            first, last = share.own_before(offset), share.own_before(end)
            run = own.tobytes()[share.own_before(lead) :][: last - first]
            part.write(block_ids, first, run, own_size)

    def digests(self, block_ids: Sequence[int], coverages: Sequence[Coverage]) -> tuple[bytes, ...]:
        """Those of whole blocks: each rank's words are summed up where they lie."""
        sizes = [
            self.block_bytes if coverage.num_bytes is None else coverage.num_bytes
            for coverage in coverages
        ]
        sized = [
            coverage._replace(num_bytes=size)
            for coverage, size in zip(coverages, sizes, strict=True)
        ]
        by_rank = [
            part.share_sums(block_ids, sized, share)
            for part, share in zip(self.parts, self.shares, strict=True)
        ]
        return tuple(
            total(sums).digest(size)
            for sums, size in zip(zip(*by_rank, strict=True), sizes, strict=True)
        )

    def _stretches(self, num_bytes: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
        """Zeros for so many bytes: [num_stretches, num_ranks, own_bytes]."""
        num, size = -(-num_bytes // self._stretch_bytes), len(self.parts)
        return np.zeros((num, size, self._stretch_bytes // size), np.uint8)
