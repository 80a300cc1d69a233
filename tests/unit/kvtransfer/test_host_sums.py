"""Sums over words of host memory are those that are defined, with and without a compiler."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.word_sums import OTHER, STRIDE
from kvtransfer import host_sums
from kvtransfer.host_sums import sums_of, sums_of_lines
from tests.word_sums import defined

SIZES = st.integers(0, 300) | st.sampled_from([4096, 8 * (1 << 13) + 5])


def content(num_bytes: int, seed: int) -> bytearray:
    return bytearray(random.Random(seed).randbytes(num_bytes))


@settings(deadline=None)
@given(SIZES, st.integers(0, 7), st.booleans())
def test_all_words(num_bytes: int, begin: int, is_compiled: bool) -> None:
    """Wherever they begin in memory."""
    data = memoryview(content(begin + num_bytes, 1))[begin:]
    with pytest.MonkeyPatch.context() as patch:
        if not is_compiled:
            patch.setattr(host_sums, "_compiled", None)
        assert sums_of(data).digest(num_bytes) == defined(bytes(data))
    assert not is_compiled or host_sums._compiled is not None


@settings(deadline=None)
@given(SIZES, st.sets(st.integers(0, 4)))
def test_some_lines(num_bytes: int, lines: set[int]) -> None:
    """And always what is behind the last whole line."""
    data = bytes(content(num_bytes, 2))
    wanted = sorted(line for line in lines if line < num_bytes // 64)
    looked_at = b"".join(data[64 * line : 64 * line + 64] for line in wanted)
    looked_at += data[num_bytes // 64 * 64 :]
    found = sums_of_lines(memoryview(data), np.array(wanted, np.int64))
    assert found.digest(num_bytes) == defined(looked_at, num_bytes)


@pytest.mark.parametrize("half", [0, 4])
def test_a_change_within_half_a_word_is_always_found(half: int) -> None:
    """Also where the other half is its key's, or is that of the second sum."""
    for index, other in ((0, 0), (9, 0), (9, OTHER)):
        data = content(120, 3)
        word = (STRIDE * (index + 1) & 2**64 - 1) ^ other
        data[8 * index : 8 * index + 8] = word.to_bytes(8, "little")
        before = sums_of(memoryview(data)).digest(120)
        for seed in range(50):
            changed = bytearray(data)
            begin = 8 * index + half
            changed[begin : begin + 4] = random.Random(seed).randbytes(4)
            assert sums_of(memoryview(changed)).digest(120) != before


def test_words_that_changed_places_are_found() -> None:
    data = content(4096, 4)
    before = sums_of(memoryview(data)).digest(4096)
    for distance in (1, 2, 8, 64, 511):
        words = np.frombuffer(data, np.uint64).copy()
        assert sums_of(memoryview(np.roll(words, distance).tobytes())).digest(4096) != before
        words[[0, distance]] = words[[distance, 0]]
        assert sums_of(memoryview(words.tobytes())).digest(4096) != before
