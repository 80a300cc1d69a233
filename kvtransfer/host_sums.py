"""Sums over words (:mod:`diptych.word_sums`) in host memory. Any thread; holds no lock meanwhile.

One loop that numba compiles, or finds in its cache, when this is imported; where numba is not
installed, numpy says the same at a tenth of the speed.
"""

import ctypes
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diptych.code_cache import code_cache
from diptych.word_sums import LINE_WORDS, OTHER, STRIDE, WORD_BYTES, Sums

_STRIDE, _OTHER = np.uint64(STRIDE), np.uint64(OTHER)
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_LINE = np.dtype(f"V{LINE_WORDS * WORD_BYTES}")
_PAIR = ctypes.c_uint64 * 2
_CHUNK: Final = 1 << 13  # words that numpy takes at a time: they stay in the cache


class Numbering(NamedTuple):
    """Which words of something larger these are: stretches of it, at even distances."""

    first: int  # the number of the first word
    stretch: int  # words that follow each other
    stride: int  # from the first word of a stretch to that of the next


def sums_of(data: memoryview, numbering: Numbering | None = None) -> Sums:
    """Of all words. data: contiguous bytes; of whole words where they are numbered.

    numbering: None: one after another, from 0 on.
    """
    num_words, num_rest = divmod(len(data), WORD_BYTES)
    first, second = 0, 0
    if num_rest:
        assert numbering is None, "a part of a word"
        rest = bytes(data[-num_rest:]).ljust(WORD_BYTES, b"\0")
        first, second = _sums(np.frombuffer(rest, "<u8"), np.array([num_words]))
    begin, stretch, stride = numbering or Numbering(0, num_words, 0)
    if _compiled is not None and num_words:
        if data.readonly or (address := _address(data)) % WORD_BYTES:
            data = memoryview(bytearray(data))  # of which an address can be had, of whole words
            address = _address(data)
        sums = _PAIR(first, second)
        _compiled(address, num_words, begin, stretch, stride, sums)
        return Sums(sums[0], sums[1])
    words = np.frombuffer(data, "<u8", num_words)
    for chunk in range(0, num_words, _CHUNK):
        numbers = np.arange(chunk, min(chunk + _CHUNK, num_words))
        more = _sums(
            words[chunk : chunk + _CHUNK], begin + numbers // stretch * stride + numbers % stretch
        )
        first, second = first + more.first, second + more.second
    return Sums(first, second)


def sums_of_lines(data: memoryview, lines: NDArray[np.int64]) -> Sums:
    """Of these whole lines and of what is behind the last one, numbered one after another."""
    num_lines = len(data) // _LINE.itemsize
    picked = np.frombuffer(data, _LINE, num_lines).take(lines)
    rest = data[num_lines * _LINE.itemsize :]
    return sums_of(picked.data.cast("B") if not rest else memoryview(picked.tobytes() + rest))


def sums_of_numbered_lines(
    data: memoryview, lines: NDArray[np.int64], numbers: NDArray[np.int64]
) -> Sums:
    """Of these lines of ``data``, which are whole ones; numbers: of each line among all."""
    words = np.frombuffer(data, "<u8").reshape(-1, LINE_WORDS).take(lines, 0)
    return _sums(words, numbers[:, None] * LINE_WORDS + np.arange(LINE_WORDS))


def _address(data: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(data))


def _sums(words: NDArray[np.uint64], numbers: NDArray[np.int64]) -> Sums:
    """By numpy. numbers: of each word."""
    keyed = words ^ (numbers + 1).astype(np.uint64) * _STRIDE
    first = ((keyed & _LOW) * (keyed >> _HALF)).sum()
    keyed ^= _OTHER
    return Sums(int(first), int(((keyed & _LOW) * (keyed >> _HALF)).sum()))


def _compile() -> Any:
    """A C function, or None without numba.

    Its arguments: address and number of the words, their numbering, address of two sums to add to.
    """
    if find_spec("numba") is None:
        return None
    import numba
    from numba import carray, types  # type: ignore[attr-defined]

    def add(address: Any, count: Any, begin: Any, stretch: Any, stride: Any, total: Any) -> None:
        words, sums = carray(address, (count,)), carray(total, (2,))
        first, second, number = np.uint64(0), np.uint64(0), np.uint64(begin)
        for done in range(0, words.size, stretch):
            key, part = number * _STRIDE, words[done : done + stretch]
            for i in range(part.size):  # from 0 on, or it is no vector's loop
                key += _STRIDE
                keyed = part[i] ^ key
                other = keyed ^ _OTHER
                first += (keyed & _LOW) * (keyed >> _HALF)
                second += (other & _LOW) * (other >> _HALF)
            number += np.uint64(stride)
        sums[0] += first
        sums[1] += second

    folder = code_cache(Path(__file__).parent)
    if folder is not None:
        numba.config.CACHE_DIR = str(folder)  # type: ignore[attr-defined]
    words = types.CPointer(types.uint64)  # type: ignore[no-untyped-call]
    signature = types.void(words, *[types.int64] * 4, words)
    made = numba.cfunc(signature, cache=folder is not None)(add)
    _alive.append(made)
    # This kind of call gives the interpreter's lock away.
    numbers = [ctypes.c_int64] * 4
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p, *numbers, ctypes.c_void_p)(
        int(made.address or 0)
    )


_alive: list[Any] = []  # the code is freed with what made it
_compiled = _compile()
