"""What a worker and the process of its transport agent say to each other, over a socket pair.

Each message is ``bytes that follow the header, kind, id`` and those bytes. Light
imports: both sides use it.
"""

import contextlib
import socket
import struct
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtransfer.agents.base import Region
from kvtransfer.block_shares import Pieces
from kvtransfer.errors import SourceLostError, TransportError

_HEADER = struct.Struct("<IBQ")
_REGION = struct.Struct("<QQQ4sI")
_PIECES = struct.Struct("<QQQQQ")  # of no bytes: there are none
_READ = struct.Struct("<QQ")  # peer, bytes of each block
_RECEIVE_BYTES = 1 << 16


class Kind(IntEnum):
    """What a message means; its id names a peer, a read, or nothing."""

    # worker to agent
    PING = 1
    SERVE = 2  # id 1: peers may be reading, progress them; id 0: none is
    CONNECT = 3  # Region and metadata of a peer; a failure shows at the first read
    DISCONNECT = 4
    READ = 5
    # agent to worker
    PONG = 11
    READY = 12  # id: address of the pool there; then the agent's metadata
    DONE = 13  # then one byte: whether no network was used
    FAILED = 14  # of a read that never began; then the error
    BROKEN = 16  # of a read that had begun; then the error: it may write until this process ends
    CONNECTING = 17  # the peer that the library is handed now; id 0: that call has returned
    UNABLE = 15  # the agent cannot be made; then the error; nothing follows


class Message(NamedTuple):
    kind: Kind
    id: int = 0
    payload: bytes = b""


class Channel:
    """One end of the socket pair, never blocking. One thread."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self.socket = end
        self._unsent = bytearray()
        self._received = bytearray()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, message: Message) -> None:
        """Send, or keep what the other side has no room for yet. Raises OSError: it is gone."""
        self._unsent += _HEADER.pack(len(message.payload), message.kind, message.id)
        self._unsent += message.payload
        self.flush()

    def flush(self) -> None:
        """Send what was kept, as far as there is room. Raises OSError: the other side is gone."""
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                num_sent = self.socket.send(self._unsent)
                del self._unsent[:num_sent]

    def receive(self) -> list[Message]:
        """What has arrived whole. Raises EOFError: the other side is gone."""
        try:
            while True:
                chunk = self.socket.recv(_RECEIVE_BYTES)
                if not chunk:
                    raise EOFError
                self._received += chunk
                if len(chunk) < _RECEIVE_BYTES:
                    break
        except BlockingIOError:
            pass
        except ConnectionError:
            raise EOFError from None
        messages, begin = [], 0
        while len(self._received) - begin >= _HEADER.size:
            num_bytes, kind, id_ = _HEADER.unpack_from(self._received, begin)
            end = begin + _HEADER.size + num_bytes
            if end > len(self._received):
                break
            payload = bytes(self._received[begin + _HEADER.size : end])
            messages.append(Message(Kind(kind), id_, payload))
            begin = end
        del self._received[:begin]
        return messages


class ReadCommand(NamedTuple):
    """Payload of READ. Block ids: [n] int32 each."""

    peer_id: int
    num_bytes: int  # of each block, from its beginning on
    source_block_ids: NDArray[np.int32]
    local_block_ids: NDArray[np.int32]

    def packed(self) -> bytes:
        return (
            _READ.pack(self.peer_id, self.num_bytes)
            + self.source_block_ids.tobytes()
            + self.local_block_ids.tobytes()
        )

    @classmethod
    def unpacked(cls, payload: bytes) -> "ReadCommand":
        peer_id, num_bytes = _READ.unpack_from(payload)
        source, local = np.frombuffer(payload, dtype=np.int32, offset=_READ.size).reshape(2, -1)
        return cls(peer_id, num_bytes, source, local)


class PeerCommand(NamedTuple):
    """Payload of CONNECT."""

    region: Region  # the source's pool
    metadata: bytes  # of its agent
    pieces: Pieces | None = None  # of all reads

    def packed(self) -> bytes:
        base, block_bytes, num_blocks, kind, device_id = self.region
        region = _REGION.pack(base, block_bytes, num_blocks, kind.encode(), device_id)
        return region + _PIECES.pack(*(self.pieces or (0,) * len(Pieces._fields))) + self.metadata

    @classmethod
    def unpacked(cls, payload: bytes) -> "PeerCommand":
        base, block_bytes, num_blocks, kind, device_id = _REGION.unpack_from(payload)
        region = Region(base, block_bytes, num_blocks, kind.decode(), device_id)
        pieces = Pieces(*_PIECES.unpack_from(payload, _REGION.size))
        metadata = payload[_REGION.size + _PIECES.size :]
        return cls(region, metadata, pieces if pieces.num_bytes else None)


def pack_error(error: TransportError) -> bytes:
    """Payload of FAILED, BROKEN and UNABLE."""
    return (b"L" if isinstance(error, SourceLostError) else b"-") + str(error).encode()


def unpack_error(payload: bytes) -> TransportError:
    message = payload[1:].decode(errors="replace")
    return SourceLostError(message) if payload[:1] == b"L" else TransportError(message)
