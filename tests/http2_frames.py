"""Calls of gRPC frame by frame, for what no client of it does: HTTP/2, without HPACK's tables."""

import asyncio
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Final

NO_FIELDS: Final[Mapping[str, str]] = {}
_DATA, _HEADERS, _RST_STREAM, _SETTINGS = 0, 1, 3, 4
_END_STREAM, _END_HEADERS = 0x1, 0x4
_FRAME_BYTES: Final = 2**14


class Connection:
    """One to a server. Its calls are numbered by odd numbers; the first 64 KiB go unasked."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0))

    def begin(self, stream_id: int, path: str, fields: Mapping[str, str] = NO_FIELDS) -> None:
        """A call of that method."""
        said = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "a"}
        said |= {"te": "trailers", "content-type": "application/grpc", **fields}
        block = b"".join(b"\0" + _text(name) + _text(value) for name, value in said.items())
        self._writer.write(_frame(_HEADERS, _END_HEADERS, stream_id, block))

    def send(self, stream_id: int, data: bytes) -> None:
        """More of a call's messages; its end is for who asks to say."""
        for start in range(0, len(data), _FRAME_BYTES):
            piece = data[start : start + _FRAME_BYTES]
            self._writer.write(_frame(_DATA, 0, stream_id, piece))

    async def num_ended(self, within_s: float, at_most: int | None = None) -> int:
        """How many calls the server ends from now on; returns early once they are ``at_most``."""
        ended: set[int] = set()
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                async for kind, flags, stream_id in self._frames():
                    if kind == _RST_STREAM or (kind in (_DATA, _HEADERS) and flags & _END_STREAM):
                        ended.add(stream_id)
                    if len(ended) == at_most:
                        break
        return len(ended)

    async def _frames(self) -> AsyncIterator[tuple[int, int, int]]:
        """What the server sends: kind, flags and call."""
        while True:
            head = await self._reader.readexactly(9)
            length, kind, flags, stream_id = struct.unpack(">IBBI", b"\0" + head)
            await self._reader.readexactly(length)
            yield kind, flags, stream_id


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Connection]:
    """To a server of this machine."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Connection(reader, writer)
    finally:
        writer.close()


def message_head(num_bytes: int, *, is_compressed: bool = False) -> bytes:
    """What goes before a message of so many bytes."""
    return struct.pack(">BI", is_compressed, num_bytes)


def _text(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()


def _frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    length = struct.pack(">I", len(payload))[1:]
    return length + struct.pack(">BBI", kind, flags, stream_id) + payload
