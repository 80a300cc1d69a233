"""The HTTP server in the router's event loop: its socket, its start, its drain."""

import asyncio
import contextlib
import functools
import math
import socket
from collections.abc import Callable, Iterator
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from diptych.errors import ConfigurationError
from diptych.rpc.connections import HTTP_SHARE, most_connections
from diptych.rpc.identity import Certificate
from diptych.timers import Timers
from router.frontend.http.protocol import MAX_HEAD_BYTES, BoundedHttpProtocol, Bounds
from router.frontend.http.tls_listener import TlsListener
from router.untaken import Untaken

_KEEP_ALIVE_S: Final = 60
_DATE_AGE_S: Final = 1.0  # of what answers say
_LAST_WORD_S: Final = 5.0
_NUM_SWALLOWED: Final = 8  # bodies of the greatest size: cut off, a client may not see why
_BACKLOG: Final = 1024
_NUM_PROBES: Final = 3
_WAITING_DIVISOR: Final = 4  # of all connections over TLS, to those before their handshake
_UNSENT_BYTES: Final = 131_072  # of one client, in the system; by itself it keeps megabytes


def bind(host: str, port: int, timers: Timers, *, shares_port: bool = False) -> socket.socket:
    """A socket that takes connections, which wait until they are served.

    With ``shares_port`` other processes may listen there too, if they say so. A client that
    has vanished, or whose window stays closed for
    ``timers.client_write_s``, loses its connection by the system.

    Raises ConfigurationError.
    """
    listener: socket.socket | None = None
    try:
        flags = socket.AI_PASSIVE | socket.AI_NUMERICSERV
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shares_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise ConfigurationError(
            f"--http-port: cannot bind {host}:{port}: {error.strerror}; "
            "0 picks a free port, --no-http serves gRPC alone"
        ) from None
    _bound_clients(listener, timers)
    return listener


def _bound_clients(listener: socket.socket, timers: Timers) -> None:
    """Set what the sockets of its connections inherit."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNSENT_BYTES)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    interval_s = math.ceil(timers.client_write_s / (_NUM_PROBES + 1))
    options = {
        "TCP_KEEPIDLE": interval_s,
        "TCP_KEEPINTVL": interval_s,
        "TCP_KEEPCNT": _NUM_PROBES,
        "TCP_USER_TIMEOUT": math.ceil(timers.client_write_s * 1000),
    }
    for name, value in options.items():
        if hasattr(socket, name):  # Linux has all of them
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def bounds_of(max_body_bytes: int, body_patience_s: float) -> Bounds:
    """What a client may do where a route reads so many bytes and waits for them so long.

    Connections get half of the files that the process may have open: no client can take
    those of gRPC and of the workers.
    """
    return Bounds(
        max_message_bytes=MAX_HEAD_BYTES + _NUM_SWALLOWED * max_body_bytes,
        body_patience_s=body_patience_s + _LAST_WORD_S,
        max_connections=most_connections(HTTP_SHARE),
    )


class HttpServer:
    """Serves an application on a bound socket. Used on the event loop's thread.

    ``serve`` is a task of the owner's; ``stop`` ends it.
    """

    def __init__(
        self,
        app: ASGIApp,
        bound: socket.socket,
        bounds: Bounds,
        untaken: Untaken,
        certificate: Certificate | None = None,
    ) -> None:
        """With a ``certificate`` clients speak TLS; its files may change.

        ``untaken`` bounds what waits for clients.
        """
        self._socket = bound
        self._certificate = certificate
        self._max_waiting = max(1, bounds.max_connections // _WAITING_DIVISOR)
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        self._uvicorn = _Server(
            uvicorn.Config(
                app,
                http=functools.partial(  # type: ignore[arg-type]
                    BoundedHttpProtocol, bounds, untaken
                ),
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                log_level="critical",  # what goes wrong is logged where it does
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_S,
            )
        )

    @property
    def port(self) -> int:
        """Where it listens."""
        port: int = self._socket.getsockname()[1]
        return port

    async def serve(self) -> None:
        """Serve until ``stop``."""
        try:
            if self._certificate is None:
                await self._uvicorn.serve(sockets=[self._socket])
            else:
                await self._serve_tls(self._certificate)
        finally:
            for server in self._uvicorn.servers:
                server.close()
            self._socket.close()
            self._ended.set()

    async def _serve_tls(self, certificate: Certificate) -> None:
        listener = TlsListener(self._socket, certificate, self._uvicorn.protocol, self._max_waiting)
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(self._uvicorn.serve(sockets=[]), name="http-uvicorn")
            await self._uvicorn.is_up.wait()
            listening = tasks.create_task(listener.run(), name="http-listener")
            stopping = tasks.create_task(self._stopping.wait(), name="http-stopping")
            await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
            listening.cancel()
            stopping.cancel()

    async def stop(self, patience_s: float) -> None:
        """Take no more connections, let answers end within ``patience_s``, cancel the rest."""
        self._uvicorn.config.timeout_graceful_shutdown = math.ceil(patience_s)
        self._stopping.set()
        self._uvicorn.leave()
        await self._ended.wait()


class _Server(uvicorn.Server):
    """Leaves the process as it is."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.servers = []  # else there are none before the first
        self.is_up = asyncio.Event()
        self._left = asyncio.Event()

    def protocol(self) -> asyncio.Protocol:
        """Of one more connection. Once it is up."""
        make: Callable[..., asyncio.Protocol] = self.config.http_protocol_class
        return make(
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn."""
        await super().startup(sockets)
        self.is_up.set()

    async def main_loop(self) -> None:
        """See uvicorn, which looks ten times a second whether it shall end."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DATE_AGE_S):
                    await self._left.wait()

    def leave(self) -> None:
        """End, by ``shutdown``."""
        self.should_exit = True
        self._left.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The process handles its signals."""
        yield
