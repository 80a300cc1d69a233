"""The digest of some bytes by its definition alone: slow, one word at a time."""

from diptych.word_sums import OTHER, STRIDE

_MASK = 2**64 - 1


def defined(data: bytes, num_bytes: int | None = None) -> bytes:
    """data: what is looked at. num_bytes: of the whole, if that is more."""
    first, second = len(data) if num_bytes is None else num_bytes, OTHER
    for index in range(-(-len(data) // 8)):
        word = int.from_bytes(data[8 * index : 8 * index + 8].ljust(8, b"\0"), "little")
        keyed = word ^ (STRIDE * (index + 1) & _MASK)
        first += _product(keyed)
        second += _product(keyed ^ OTHER)
    return b"".join((each & _MASK).to_bytes(8, "little") for each in (first, second))


def _product(word: int) -> int:
    return (word & 0xFFFFFFFF) * (word >> 32)
