"""Whoever asks routers over HTTP, by the key and the authority that its files name now."""

import asyncio
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable

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

    What went over older ones goes on to its end; the next request after that closes them.
    """

    def __init__(self, ca: WatchedFile[ssl.SSLContext] | None, limits: httpx.Limits) -> None:
        self._limits = limits
        self._ca = ca
        self._trust = ssl.create_default_context() if ca is None else ca.content
        self._pool = self._open()
        self._older = set[_Pool]()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """See httpx."""
        if self._ca is not None and self._ca.content is not self._trust:
            self._trust = self._ca.content
            self._older.add(self._pool)
            self._pool = self._open()
        for pool in [each for each in self._older if not each.num_open]:
            await pool.transport.aclose()
            self._older.discard(pool)
        return await self._pool.ask(request)

    async def aclose(self) -> None:
        """See httpx."""
        for pool in (*self._older, self._pool):
            await pool.transport.aclose()

    def _open(self) -> "_Pool":
        return _Pool(
            httpx.AsyncHTTPTransport(
                verify=self._trust,
                trust_env=False,
                limits=self._limits,
                socket_options=_LIVELINESS,
            )
        )


class _Pool:
    """Connections under one authority; ``num_open`` requests over them have not ended."""

    def __init__(self, transport: httpx.AsyncHTTPTransport) -> None:
        self.transport = transport
        self.num_open = 0

    async def ask(self, request: httpx.Request) -> httpx.Response:
        """What is answered. It is open until its stream is closed."""
        self.num_open += 1
        try:
            response = await self.transport.handle_async_request(request)
            assert isinstance(response.stream, httpx.AsyncByteStream)
        except BaseException:
            self.num_open -= 1
            raise
        response.stream = _Counted(response.stream, self)
        return response


class _Counted(httpx.AsyncByteStream):
    """An answer's bytes; ``pool`` learns when they are closed, which httpx does once."""

    def __init__(self, stream: httpx.AsyncByteStream, pool: _Pool) -> None:
        self._stream = stream
        self._pool = pool

    def __aiter__(self) -> AsyncIterator[bytes]:
        """See httpx."""
        return aiter(self._stream)

    async def aclose(self) -> None:
        """See httpx."""
        try:
            await self._stream.aclose()
        finally:
            self._pool.num_open -= 1
