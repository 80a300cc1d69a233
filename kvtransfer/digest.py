"""Digests: of a block, of a pull, of a memory descriptor. Pure; any thread.

A block's is of sums over its words (:mod:`diptych.word_sums`), which a device computes of
what lies on it and the host of what lies there, to the same bits; all others are xxh3_128.
Both find every accident (truncation, reuse, a flipped bit) and no attack: whoever can forge
bytes here can read the peer's memory anyway.

Of a block only what its sequence needs is shipped (:mod:`diptych.block_needs`), so a
digest is of these first bytes alone. What it covers of them is the level's choice.
``full``: every byte, so any difference is found. ``sampled``: one line of 64 bytes out of
each *stratum* of 32 consecutive ones (3 % of the bytes). The seed is drawn by the source
for each range, after its KV was complete, so no stale copy can happen to agree where it
matters; which line of a stratum also turns with the block's place in the sequence. Found
with probability, per block:

- the whole block stale, or any run of 4032 bytes or more (a torn page): 1;
- a run of n whole lines, n < 32: n / 32, at the least;
- one line, down to one bit of it: 1 / 32; the same line in each of 32 blocks in a row
  (a layer that was never written): 1.

What lies in one of several ranks' pools is so many pieces of the whole block, one for each
stretch of heads. A run or a block that is wrong there is found by each piece on its own: pieces
of n lines in k strata with 1 - (1 - n / 32)**k, so a rank's block of 16 lines a stretch in 24
layers is missed once in 2**48, but a torn page of it, 4 pieces, once in 16.

``off``: nothing; coverage, lease and generations are checked all the same.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from diptych.v1 import kv_source_pb2
from diptych.word_sums import LINE_WORDS, WORD_BYTES, Sums, Words
from kvtransfer.block_shares import BlockShare
from kvtransfer.host_sums import Numbering, sums_of, sums_of_lines, sums_of_numbered_lines

DIGEST_BYTES = 16
LINE_BYTES = LINE_WORDS * WORD_BYTES
STRATUM_LINES = 32

_TURN = 5  # lines from one block to the next; odd, so 32 blocks in a row see every line


class Coverage(NamedTuple):
    """Which bytes of one block its digest is about."""

    seed: int = 0  # 0: all of them; else what the source drew for the range
    place: int = 0  # index of the block in its sequence
    num_bytes: int | None = None  # no others than the first so many; None: all of the block


WHOLE = Coverage()


def coverages(
    num_bytes: Sequence[int], seed: int = 0, first_place: int = 0
) -> tuple[Coverage, ...]:
    """Of blocks that follow each other in a sequence, from its ``first_place``-th block on.

    num_bytes: of each, from its beginning on.
    """
    return tuple(Coverage(seed, place, num) for place, num in enumerate(num_bytes, first_place))


def block_digest(block: bytes | bytearray | memoryview, coverage: Coverage = WHOLE) -> bytes:
    """Digest of one block, unused slots included, as far as ``coverage`` goes."""
    block = memoryview(block)[: coverage.num_bytes]
    if not coverage.seed:
        return sums_of(block).digest(len(block))
    lines = sampled_lines(coverage, len(block) // LINE_BYTES)
    return sums_of_lines(block, lines).digest(len(block))


def share_sums(block: memoryview, coverage: Coverage, share: BlockShare) -> Sums:
    """What one rank's block gives to the digest of a whole one: all ranks' sums are its sums.

    block: the rank's, of whole lines in each stretch. coverage: of the whole block, with how
    many of its bytes, whole stretches.
    """
    size = coverage.num_bytes or 0
    assert not size % share.stretch_bytes, "a part of a stretch"
    block = block[: size // share.size]
    if not coverage.seed:
        own, whole = share.own_bytes // WORD_BYTES, share.stretch_bytes // WORD_BYTES
        return sums_of(block, Numbering(share.rank * own, own, whole))
    lines = _own_lines(coverage, share)
    (numbers,) = np.nonzero(lines >= 0)
    return sums_of_numbered_lines(block, lines[numbers], numbers)


def _own_lines(coverage: Coverage, share: BlockShare) -> NDArray[np.int64]:
    """Where a rank has the lines that are looked at of a whole block; -1: another rank has it."""
    lines = sampled_lines(coverage, (coverage.num_bytes or 0) // LINE_BYTES)
    own, whole = share.own_bytes // LINE_BYTES, share.stretch_bytes // LINE_BYTES
    stretches, places = np.divmod(lines, whole)
    return np.where(places // own == share.rank, stretches * own + places % own, -1)


class ShareWords(NamedTuple):
    """What a rank's blocks give to the digests of whole ones: the sums of all runs of a block."""

    words: Words
    num_runs: NDArray[np.int64]  # of each block


def share_words(
    begins: Sequence[int], coverages: Sequence[Coverage], share: BlockShare
) -> ShareWords:
    """What to sum up of a rank's blocks that begin at these bytes. coverages: as ``share_sums``."""
    sizes = np.array([coverage.num_bytes or 0 for coverage in coverages], np.int64)
    first_words = np.array(begins, np.int64) // WORD_BYTES
    if any(coverage.seed for coverage in coverages):
        picked = [_own_lines(coverage, share) for coverage in coverages]
        lines = np.full((len(picked), max(map(len, picked))), -1)
        for row, each in enumerate(picked):
            lines[row, : len(each)] = each
        counts = sizes // share.size // WORD_BYTES
        return ShareWords(Words(first_words, counts, lines), np.ones(len(sizes), np.int64))
    own, whole = share.own_bytes // WORD_BYTES, share.stretch_bytes // WORD_BYTES
    num_runs = sizes // share.stretch_bytes
    stretches = np.arange(num_runs.sum()) - np.repeat(np.cumsum(num_runs) - num_runs, num_runs)
    words = Words(
        np.repeat(first_words, num_runs) + stretches * own,
        np.full(len(stretches), own),
        None,
        stretches * whole + share.rank * own,
    )
    return ShareWords(words, num_runs)


def words_of(begins: Sequence[int], sizes: Sequence[int], coverages: Sequence[Coverage]) -> Words:
    """What to sum up for the digests of blocks that begin at these bytes and have so many.

    All of one level, and of whole words. Their sums' digests are the blocks'.
    """
    lines = None
    if any(coverage.seed for coverage in coverages):
        picked = []
        for coverage, size in zip(coverages, sizes, strict=True):
            num_lines = size // LINE_BYTES
            picked.append(np.append(sampled_lines(coverage, num_lines), num_lines))  # and the rest
        lines = np.full((len(picked), max(map(len, picked))), -1)
        for row, each in enumerate(picked):
            lines[row, : len(each)] = each
    return Words(np.array(begins) // WORD_BYTES, np.array(sizes) // WORD_BYTES, lines)


def sampled_lines(coverage: Coverage, num_lines: int) -> NDArray[np.int64]:
    """Indices of the whole lines looked at in a block of ``num_lines``: one of each stratum."""
    first, width, drawn = _strata(coverage.seed, num_lines)
    return first + (drawn + _TURN * coverage.place) % width


@lru_cache(maxsize=64)  # one range's blocks come one after another
def _strata(
    seed: int, num_lines: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """First line, number of lines and a drawn offset of each stratum."""
    first = np.arange(0, num_lines, STRATUM_LINES)
    width = np.minimum(num_lines - first, STRATUM_LINES)
    return first, width, np.random.default_rng(seed).integers(0, STRATUM_LINES, len(first))


def combined_digest(digests: Iterable[bytes]) -> bytes:
    """Digest over blocks' digests in order: what Confirm carries."""
    return xxhash.xxh3_128_digest(b"".join(digests))


def descriptor_digest(descriptor: kv_source_pb2.MemoryDescriptor) -> bytes:
    """Digest over every field of ``descriptor`` but ``digest`` itself; of ranks over theirs."""
    digest = xxhash.xxh3_128()
    for field in (
        descriptor.agent_metadata,
        descriptor.memory_kind.encode(),
        descriptor.base_address.to_bytes(8, "little"),
        descriptor.block_bytes.to_bytes(8, "little"),
        descriptor.num_blocks.to_bytes(8, "little"),
        descriptor.device_id.to_bytes(4, "little"),
        *(rank.digest for rank in descriptor.ranks),
    ):
        digest.update(len(field).to_bytes(8, "little"))  # so that no byte can change fields
        digest.update(field)
    return digest.digest()
