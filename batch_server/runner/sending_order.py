"""In which order lines are sent: those together whose prompts begin alike. Pure."""

import hashlib
from collections import Counter
from collections.abc import Iterable
from typing import Final, NamedTuple

_HEAD_CHARACTERS: Final = 512
_LONGER: Final = (2048, 8192, 32_768)  # characters: a system prompt, and documents behind it
_DIGEST_BYTES: Final = 8


class SendingKey(NamedTuple):
    """What is known of a line's prompt until all lines are."""

    head: str
    longer: tuple[bytes, ...]  # digests of longer beginnings, as many as it has
    num_characters: int
    number: int

    @classmethod
    def of(cls, number: int, prompt: str) -> "SendingKey":
        """Of the line with that number."""
        longer = tuple(_digest(prompt[:most]) for most in _LONGER if most <= len(prompt))
        return cls(prompt[:_HEAD_CHARACTERS], longer, len(prompt), number)


def ranks(keys: Iterable[SendingKey]) -> dict[int, int]:
    """The place of each line among those that are sent, by its number.

    Of prompts that begin alike the short go first, so that those of a step are of like lengths.
    """
    known = list(keys)
    shared = Counter(digest for key in known for digest in key.longer)

    def place(key: SendingKey) -> tuple[str, tuple[bytes, ...], int, int]:
        groups = tuple(digest for digest in key.longer if shared[digest] > 1)
        return key.head, groups, key.num_characters, key.number

    return {key.number: rank for rank, key in enumerate(sorted(known, key=place))}


def _digest(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
