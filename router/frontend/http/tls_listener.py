"""Connections over TLS: taken one by one, their handshakes made a few at a time."""

import asyncio
import socket
from collections.abc import Callable
from typing import Final

from diptych.rpc.identity import Certificate

AT_ONCE: Final = 128  # handshakes; each costs the event loop about a millisecond
_HANDSHAKE_S: Final = 5.0
_REST_S: Final = 0.1  # when no connection can be taken: the process is out of files


class TlsListener:
    """Listens on a bound socket for as long as it runs. Event loop only.

    Who connects and says nothing is left after some seconds, and until then keeps nobody from
    being served but those who have yet to shake hands: they wait with the system, which bounds
    their number. So clients cost no file and no time beyond a bound before they spoke TLS.
    """

    def __init__(
        self,
        bound: socket.socket,
        certificate: Certificate,
        make_protocol: Callable[[], asyncio.Protocol],
    ) -> None:
        """``make_protocol`` is called for each connection; its certificate is that of then."""
        self._socket = bound
        self._certificate = certificate
        self._make_protocol = make_protocol
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def run(self) -> None:
        """Until cancelled; handshakes under way end with it, connections do not."""
        loop = asyncio.get_running_loop()
        self._socket.setblocking(False)
        async with asyncio.TaskGroup() as handshakes:
            while True:
                await self._turns.acquire()
                try:
                    accepted, _ = await loop.sock_accept(self._socket)
                except OSError:
                    self._turns.release()
                    await asyncio.sleep(_REST_S)
                    continue
                handshakes.create_task(self._shake_hands(accepted), name="tls-handshake")

    async def _shake_hands(self, accepted: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make_protocol,
                accepted,
                ssl=self._certificate.tls_context(),
                ssl_handshake_timeout=_HANDSHAKE_S,
            )
        except OSError:  # they disagree, or the client is gone or silent
            accepted.close()
        finally:
            self._turns.release()
