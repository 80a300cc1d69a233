"""Sums over words (:mod:`diptych.word_sums`) in host memory. Any thread; holds no lock meanwhile.

One loop that numba compiles, or finds in its cache, when this is imported; where numba is not
installed, numpy says the same at a tenth of the speed.
"""

import ctypes
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from diptych.code_cache import code_cache
from diptych.word_sums import LINE_WORDS, OTHER, STRIDE, WORD_BYTES, Sums

_STRIDE, _OTHER = np.uint64(STRIDE), np.uint64(OTHER)
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_LINE = np.dtype(f"V{LINE_WORDS * WORD_BYTES}")
_PAIR = ctypes.c_uint64 * 2
_CHUNK: Final = 1 << 13  # words that numpy takes at a time: they stay in the cache


def sums_of(data: memoryview) -> Sums:
    """Of all words. data: contiguous bytes."""
    num_words, num_rest = divmod(len(data), WORD_BYTES)
    first, second = 0, 0
    if num_rest:
        rest = bytes(data[-num_rest:]).ljust(WORD_BYTES, b"\0")
        first, second = _sums(np.frombuffer(rest, "<u8"), num_words)
    if _compiled is not None and num_words:
        if data.readonly or (address := _address(data)) % WORD_BYTES:
            data = memoryview(bytearray(data))  # of which an address can be had, of whole words
            address = _address(data)
        sums = _PAIR(first, second)
        _compiled(address, num_words, sums)
        return Sums(sums[0], sums[1])
    words = np.frombuffer(data, "<u8", num_words)
    for begin in range(0, num_words, _CHUNK):
        more = _sums(words[begin : begin + _CHUNK], begin)
        first, second = first + more.first, second + more.second
    return Sums(first, second)


def sums_of_lines(data: memoryview, lines: NDArray[np.int64]) -> Sums:
    """Of these whole lines and of what is behind the last one, numbered one after another."""
    num_lines = len(data) // _LINE.itemsize
    picked = np.frombuffer(data, _LINE, num_lines).take(lines)
    rest = data[num_lines * _LINE.itemsize :]
    return sums_of(picked.data.cast("B") if not rest else memoryview(picked.tobytes() + rest))


def _address(data: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(data))


def _sums(words: NDArray[np.uint64], begin: int) -> Sums:
    """By numpy, of words of which the first one's number is ``begin``."""
    keyed = words ^ np.arange(begin + 1, begin + 1 + len(words), dtype=np.uint64) * _STRIDE
    first = ((keyed & _LOW) * (keyed >> _HALF)).sum()
    keyed ^= _OTHER
    return Sums(int(first), int(((keyed & _LOW) * (keyed >> _HALF)).sum()))


def _compile() -> Any:
    """A C function: addresses of words and of two sums that it adds to; None without numba."""
    if find_spec("numba") is None:
        return None
    import numba
    from numba import carray, types  # type: ignore[attr-defined]

    def add(address: Any, count: Any, total: Any) -> None:
        words, sums = carray(address, (count,)), carray(total, (2,))
        first, second, key = np.uint64(0), np.uint64(0), np.uint64(0)
        for i in range(words.size):
            key += _STRIDE
            keyed = words[i] ^ key
            other = keyed ^ _OTHER
            first += (keyed & _LOW) * (keyed >> _HALF)
            second += (other & _LOW) * (other >> _HALF)
        sums[0] += first
        sums[1] += second

    folder = code_cache(Path(__file__).parent)
    if folder is not None:
        numba.config.CACHE_DIR = str(folder)  # type: ignore[attr-defined]
    words = types.CPointer(types.uint64)  # type: ignore[no-untyped-call]
    signature = types.void(words, types.int64, words)
    made = numba.cfunc(signature, cache=folder is not None)(add)
    _alive.append(made)
    # This kind of call gives the interpreter's lock away.
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)(
        int(made.address or 0)
    )


_alive: list[Any] = []  # the code is freed with what made it
_compiled = _compile()
