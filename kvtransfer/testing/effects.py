"""How a fault changes a message or the bytes of blocks. Pure; for tests' faults only."""

import random
from collections.abc import Sequence
from typing import Any, Final

from google.protobuf.message import Message

_FIELD: Final = {
    "FetchOpen": "ticket",
    "FetchOpened": "end_token",
    "Range": "digests",
    "Data": "payload",
    "Confirm": "digest",
}


def corrupted(message: Message, field: str, rng: random.Random) -> None:
    """Change one bit (an integer's at 2**20, so that it is far off) or one letter, in place.

    Of several integers, exchange two: a block next to the right one may hold the same bytes.
    """
    name, value = _field_of(message, field)
    if name is None:
        return
    if isinstance(value, bytes):
        _set(message, name, _flipped(value, rng))
    elif isinstance(value, str):
        _set(message, name, value[:-1] + ("0" if value[-1:] != "0" else "1"))
    elif isinstance(value, bool):
        _set(message, name, not value)
    elif isinstance(value, int):
        _set(message, name, value ^ (1 << 20))
    elif len(value):
        index = rng.randrange(len(value))
        if isinstance(value[index], bytes):
            value[index] = _flipped(value[index], rng)
        elif len(value) == 1:
            value[index] ^= 1 << 20
        else:
            value[index], value[index - 1] = value[index - 1], value[index]


def truncated(message: Message, field: str) -> None:
    """Take the second half away, in place; the last one of a list."""
    name, value = _field_of(message, field)
    if name is None:
        return
    if isinstance(value, bytes | str):
        _set(message, name, value[: len(value) // 2])
    elif isinstance(value, int):
        _set(message, name, value // 2)
    elif len(value):
        del value[-1]


def flip_bit(blocks: Sequence[memoryview], rng: random.Random) -> None:
    """One bit of one block."""
    block = rng.choice(blocks)
    block[rng.randrange(len(block))] ^= 1 << rng.randrange(8)


def poison(blocks: Sequence[memoryview], rng: random.Random) -> None:
    """What was never written: not even by chance the same as what should be there."""
    for block in blocks:
        block[:] = rng.randbytes(len(block))


def poison_tail(blocks: Sequence[memoryview], rng: random.Random) -> None:
    """The second half of the last block was never written."""
    last = blocks[-1]
    last[len(last) // 2 :] = rng.randbytes(len(last) - len(last) // 2)


def swap_halves(blocks: Sequence[memoryview]) -> None:
    """The first half of the first block and the second of the last lie in each other's place."""
    half = len(blocks[0]) // 2
    first, last = bytes(blocks[0][:half]), bytes(blocks[-1][-half:])
    blocks[0][:half], blocks[-1][-half:] = last, first


def _field_of(message: Message, field: str) -> tuple[str | None, Any]:
    name = field or _FIELD.get(message.DESCRIPTOR.name)
    return name, None if name is None else getattr(message, name)


def _set(message: Message, name: str, value: object) -> None:
    setattr(message, name, value)


def _flipped(value: bytes, rng: random.Random) -> bytes:
    if not value:
        return b"\x01"
    changed = bytearray(value)
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)
