"""What a digest is made of: sums that any processor makes, of any part, in any order. Pure.

A *word* is 8 bytes, little-endian; the last one of some bytes is filled up with zeros. With
``key = STRIDE * (i + 1)`` for word ``i``, and ``low`` and ``high`` the halves of 64 bits, all
modulo 2**64::

    sums[0] = sum of low(word ^ key) * high(word ^ key)
    sums[1] = sum of low(word ^ key ^ OTHER) * high(word ^ key ^ OTHER)

(products of keyed halves: NH, of UMAC by Black, Halevi, Krawczyk, Krovetz and Rogaway, 1999).
A change within one half of a word always changes one of the sums: it can only hide in the
first where the other half is its key's, and there it is not in the second, as both halves of
OTHER have bits. Of changes in several words both are not independent: opposite flips of one bit in
two words hide in both if the other keyed halves of these are alike, which is once in 2**33 pairs
of random words. It finds accidents, and no attack. Where only some lines are looked at, their
words are numbered one after another.

The host sums in ``kvtransfer.host_sums``, a device in ``diptych.engine.backends.cuda``.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

ALGORITHM: Final = "products64x2"  # workers must have the same to be a pair
WORD_BYTES: Final = 8
LINE_WORDS: Final = 8  # words that are left out or looked at together

STRIDE: Final = 0x9E3779B97F4A7C15
OTHER: Final = 0xD1B54A32D192ED03

_MASK: Final = (1 << 64) - 1


class Words(NamedTuple):
    """Which words to sum up of each of some runs of bytes that begin at whole words."""

    begins: NDArray[np.int64]  # [N], the first word of each, counted from the memory's first
    counts: NDArray[np.int64]  # [N], of each run
    lines: NDArray[np.int64] | None  # [N, L], which lines; -1: none; None: all words
    numbers: NDArray[np.int64] | None = None  # [N], of the first words, of all; None: 0


class Sums(NamedTuple):
    """Of one run of bytes; each may still be above 2**64."""

    first: int
    second: int

    def digest(self, num_bytes: int) -> bytes:
        """16 bytes; that of no bytes is not zero. num_bytes: of the run."""
        first, second = (self.first + num_bytes) & _MASK, (self.second + OTHER) & _MASK
        return (first | second << 64).to_bytes(16, "little")


def total(sums: Iterable[Sums]) -> Sums:
    """Of several runs that are parts of one."""
    first, second = 0, 0
    for each in sums:
        first, second = first + each.first, second + each.second
    return Sums(first, second)
