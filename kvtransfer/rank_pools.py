"""The pools of a worker's ranks as one: blocks are whole, whoever has which heads of them.

So leases, announcements, digests and messages are those of one rank; only what reads memory
directly (``transports.rank_transports``) knows that there are several pools.
"""

from collections.abc import Iterator, Sequence

from diptych.errors import ConfigurationError, DeviceLostError
from diptych.word_sums import Sums
from kvtransfer.block_shares import BlockShare, Span
from kvtransfer.digest import LINE_BYTES, Coverage, share_sums
from kvtransfer.memory import HostMemory


class RankPools:
    """Implements ``BlockMemory``; the addresses are those of its ``parts``.

    The same block id names a block's part in each of them.
    """

    def __init__(self, parts: Sequence[HostMemory], stretch_bytes: int) -> None:
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
        self._shares = [BlockShare(rank, size, stretch_bytes // size) for rank in range(size)]

    @property
    def lost(self) -> DeviceLostError | None:
        return next((part.lost for part in self.parts if part.lost is not None), None)

    def read(
        self, block_ids: Sequence[int], begin: int, end: int, num_bytes: int | None = None
    ) -> bytes:
        size = num_bytes or self.block_bytes
        content = bytearray()
        for index in range(begin // size, -(-end // size)):
            first, last = max(begin - index * size, 0), min(end - index * size, size)
            block = bytearray(last - first)
            for part, span in self._spans(first, last):
                run = part.block(block_ids[index])[span.own_begin :][: span.num_bytes]
                place = span.whole_begin - first
                block[place : place + span.num_bytes] = run
            content += block
        return bytes(content)

    def write(
        self, block_ids: Sequence[int], offset: int, payload: bytes, num_bytes: int | None = None
    ) -> None:
        size = num_bytes or self.block_bytes
        rest = memoryview(payload)
        for block_id in block_ids:
            end = min(size, offset + len(rest))
            for part, span in self._spans(offset, end):
                place = span.whole_begin - offset
                run = part.block(block_id)[span.own_begin :]
                run[: span.num_bytes] = rest[place : place + span.num_bytes]
            rest, offset = rest[end - offset :], 0
        if rest:
            raise IndexError(f"{len(rest)} bytes too many for {len(block_ids)} blocks")

    def digests(self, block_ids: Sequence[int], coverages: Sequence[Coverage]) -> tuple[bytes, ...]:
        """Those of whole blocks: each rank's words are summed up where they lie."""
        return tuple(
            self._digest(block_id, coverage)
            for block_id, coverage in zip(block_ids, coverages, strict=True)
        )

    def _digest(self, block_id: int, coverage: Coverage) -> bytes:
        size = self.block_bytes if coverage.num_bytes is None else coverage.num_bytes
        sums = [
            share_sums(part.block(block_id), coverage._replace(num_bytes=size), share)
            for part, share in zip(self.parts, self._shares, strict=True)
        ]
        return Sums(sum(each.first for each in sums), sum(each.second for each in sums)).digest(
            size
        )

    def _spans(self, begin: int, end: int) -> Iterator[tuple[HostMemory, Span]]:
        for part, share in zip(self.parts, self._shares, strict=True):
            for span in share.spans(begin, end):
                yield part, span
