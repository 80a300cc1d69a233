"""Connections over TLS: taken one by one, their handshakes made a few at a time."""

import asyncio
import socket
from collections.abc import Callable
from typing import Final

from diptych.rpc.identity import Certificate

AT_ONCE: Final = 128  # handshakes; each costs the event loop about a millisecond
_HANDSHAKE_S: Final = 5.0
_SILENT_S: Final = 0.25  # that each may be, however many are
_SHAKING_S: Final = 1.0  # that each may shake hands, however many wait to
_REST_S: Final = 0.1  # when no connection can be taken: the process is out of files
_HEAD_BYTES: Final = 5  # of a record: its type, version and length
_HANDSHAKE: Final = 0x16
_MOST_BYTES: Final = 2**14  # of a record behind its head


class TlsListener:
    """Listens on a bound socket for as long as it runs. Event loop only.

    Who connects and says nothing is left after some seconds, or for who comes when too many do, the
    longest first: it keeps nobody from being served. Only who has said its first word, all of it,
    takes a turn to shake hands; who then does not go on is left likewise, for who waits for a turn.
    So clients cost no file and no time beyond a bound before they spoke TLS.
    """

    def __init__(
        self,
        bound: socket.socket,
        certificate: Certificate,
        make_protocol: Callable[[], asyncio.Protocol],
        max_waiting: int,
    ) -> None:
        """``make_protocol`` is called for each connection; its certificate is that of then.

        ``max_waiting`` are taken before it is their turn to shake hands.
        """
        self._socket = bound
        self._certificate = certificate
        self._make_protocol = make_protocol
        self._places = asyncio.Semaphore(max_waiting)
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._num_waiting = 0  # for a turn
        self._silent: dict[socket.socket, asyncio.Timeout] = {}  # the longest first
        self._shaking: dict[socket.socket, asyncio.Timeout] = {}  # likewise

    async def run(self) -> None:
        """Until cancelled; handshakes under way end with it, connections do not."""
        loop = asyncio.get_running_loop()
        self._socket.setblocking(False)
        async with asyncio.TaskGroup() as handshakes:
            while True:
                if self._places.locked():
                    _leave_one(self._silent, _SILENT_S)
                await self._places.acquire()
                try:
                    accepted, _ = await loop.sock_accept(self._socket)
                except OSError:
                    self._places.release()
                    await asyncio.sleep(_REST_S)
                    continue
                handshakes.create_task(self._serve(accepted), name="tls-handshake")

    async def _serve(self, accepted: socket.socket) -> None:
        try:
            try:
                await self._hear(accepted)
                await self._take_turn()
            finally:
                self._places.release()
        except BaseException as error:
            accepted.close()
            if not isinstance(error, OSError):
                raise
            return
        try:
            patience_s = _SHAKING_S if self._num_waiting else _HANDSHAKE_S
            async with asyncio.timeout(patience_s) as patience:
                if not self._num_waiting:
                    self._shaking[accepted] = patience
                await asyncio.get_running_loop().connect_accepted_socket(
                    self._make_protocol, accepted, ssl=self._certificate.tls_context()
                )
        except OSError:  # they disagree, or the client is gone or silent
            accepted.close()
        finally:
            self._shaking.pop(accepted, None)
            self._turns.release()

    async def _take_turn(self) -> None:
        """Wait for a turn to shake hands, for which the one who has one longest may be left."""
        if self._turns.locked():
            _leave_one(self._shaking, _SHAKING_S)
        self._num_waiting += 1
        try:
            await self._turns.acquire()
        finally:
            self._num_waiting -= 1

    async def _hear(self, accepted: socket.socket) -> None:
        """Wait until a client's first record is there. Raises OSError: it is gone, or left."""
        try:
            async with asyncio.timeout(_HANDSHAKE_S) as patience:
                self._silent[accepted] = patience
                await _readable(accepted, _HEAD_BYTES)
                head = accepted.recv(_HEAD_BYTES, socket.MSG_PEEK)
                if len(head) == _HEAD_BYTES and head[0] == _HANDSHAKE:
                    num_bytes = min(int.from_bytes(head[3:]), _MOST_BYTES)
                    await _readable(accepted, _HEAD_BYTES + num_bytes)
        finally:
            self._silent.pop(accepted, None)
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)


def _leave_one(connections: dict[socket.socket, asyncio.Timeout], least_s: float) -> None:
    """The first, if there is one, once it has had ``least_s`` of ``_HANDSHAKE_S``."""
    if connections:
        patience = connections.pop(next(iter(connections)))
        ends_s = patience.when()
        assert ends_s is not None
        if not patience.expired():
            patience.reschedule(ends_s - _HANDSHAKE_S + least_s)


async def _readable(accepted: socket.socket, num_bytes: int) -> None:
    """Wait until so many bytes are there, or no more will come."""
    loop = asyncio.get_running_loop()
    is_readable = loop.create_future()
    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)

    def tell() -> None:
        if not is_readable.done():
            is_readable.set_result(None)

    loop.add_reader(accepted, tell)
    try:
        await is_readable
    finally:
        loop.remove_reader(accepted)
