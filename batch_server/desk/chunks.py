"""Bytes that come in pieces of any size, in pieces of one size. Pure."""

from collections.abc import AsyncGenerator, AsyncIterator


async def in_chunks(pieces: AsyncIterator[bytes], num_bytes: int) -> AsyncGenerator[bytes, None]:
    """The same, ``num_bytes`` at a time; the last has what is left. Holds one piece and a chunk."""
    held = bytearray()
    async for piece in pieces:
        held += piece
        while len(held) >= num_bytes:
            yield bytes(held[:num_bytes])
            del held[:num_bytes]
    if held:
        yield bytes(held)
