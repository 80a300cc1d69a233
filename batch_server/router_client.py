"""Whoever asks routers over HTTP, by the key and the authority that its files name now."""

import asyncio
import socket
import ssl
import time
from collections.abc import Callable

import httpx

from batch_server.config import BatchServerConfig
from router.frontend.callers.watched_file import WatchedFile, trusting

_CONNECT_S = 5.0
_WRITE_S = 60.0
# An answer may take its time, but not from a machine that is gone: that breaks the connection.
_LIVELINESS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),  # s
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),  # s
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),  # ms
)


class RouterFiles:
    """What routers know a batch server by, its key, and it them, their authority. Event loop only.

    Either may be unset. ``run`` keeps them up to date.
    """

    def __init__(self, config: BatchServerConfig, now: Callable[[], float] = time.time) -> None:
        """``now`` is of the wall clock, s. Raises ConfigurationError: one is of no use."""
        self.key: WatchedFile[str] | None = None
        self.ca: WatchedFile[ssl.SSLContext] | None = None
        if config.router_key_file is not None:
            self.key = WatchedFile(
                "router-key-file",
                config.router_key_file,
                _read_key,
                what="key for routers",
                now=now,
            )
        if config.router_ca is not None:
            self.ca = WatchedFile(
                "router-ca", config.router_ca, trusting, what="authority of routers", now=now
            )

    async def run(self) -> None:
        """Follow them, until cancelled: a change counts within three seconds."""
        async with asyncio.TaskGroup() as tasks:
            for file in (self.key, self.ca):
                if file is not None:
                    tasks.create_task(file.run())


def _read_key(text: str) -> str:
    """Raises ValueError, which says nothing of it: no header could have it."""
    key = text.strip()
    if not (key and key.isascii() and key.isprintable()):
        raise ValueError("expected one key, a line of ASCII")
    return key


def router_client(files: RouterFiles, *, max_connections: int) -> httpx.AsyncClient:
    """Whoever asks the routers."""
    return httpx.AsyncClient(
        auth=_with_key(files.key),
        transport=_Following(files.ca, httpx.Limits(max_connections=max_connections)),
        trust_env=False,
        timeout=httpx.Timeout(None, connect=_CONNECT_S, write=_WRITE_S),
    )


def _with_key(key: WatchedFile[str] | None) -> Callable[[httpx.Request], httpx.Request] | None:
    if key is None:
        return None

    def add(request: httpx.Request) -> httpx.Request:
        request.headers["authorization"] = f"Bearer {key.content}"
        return request

    return add


class _Following(httpx.AsyncBaseTransport):
    """Connections to routers; those that begin after another authority was taken over trust it.

    What went over older ones goes on to its end.
    """

    def __init__(self, ca: WatchedFile[ssl.SSLContext] | None, limits: httpx.Limits) -> None:
        self._limits = limits
        self._ca = ca
        self._trust = ssl.create_default_context() if ca is None else ca.content
        self._transports = [self._open()]  # the last one is used

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """See httpx."""
        if self._ca is not None and self._ca.content is not self._trust:
            self._trust = self._ca.content
            self._transports.append(self._open())
        return await self._transports[-1].handle_async_request(request)

    async def aclose(self) -> None:
        """See httpx."""
        for transport in self._transports:
            await transport.aclose()

    def _open(self) -> httpx.AsyncHTTPTransport:
        return httpx.AsyncHTTPTransport(
            verify=self._trust,
            trust_env=False,
            limits=self._limits,
            socket_options=_LIVELINESS,
        )
