"""The HTTP server's socket, what its clients' sockets inherit, and its end. No network."""

import asyncio
import errno
import signal
import socket
from typing import cast

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from diptych.errors import ConfigurationError
from diptych.rpc.identity import Certificate
from diptych.timers import Timers
from router.frontend.http import server as http_server
from router.frontend.http.protocol import MAX_HEAD_BYTES, BoundedHttpProtocol, Bounds
from router.frontend.http.server import HttpServer, bind, bounds_of
from router.untaken import Untaken
from tests.unit.router.frontend.http.test_protocol import Transport
from tests.virtual_time import run_virtually

TIMERS = Timers(client_write_s=10.0)
BOUNDS = Bounds(max_message_bytes=1000, body_patience_s=1.0, max_connections=9)


class Listener:
    """A socket that keeps what was set."""

    def __init__(self, family: int, kind: int, protocol: int) -> None:
        self.kind = family, kind, protocol
        self.options: dict[tuple[int, int], int] = {}
        self.options_when_bound: set[tuple[int, int]] = set()
        self.bound: object = None
        self.backlog = 0
        self.is_closed = False

    def setsockopt(self, level: int, name: int, value: int) -> None:
        self.options[level, name] = value

    def bind(self, address: tuple[str, int]) -> None:
        if address[1] == 1:
            raise OSError(errno.EACCES, "Permission denied")
        self.bound, self.options_when_bound = address, set(self.options)

    def listen(self, backlog: int) -> None:
        assert self.bound
        self.backlog = backlog

    def getsockname(self) -> object:
        return self.bound

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Listener]:
    """All sockets."""
    sockets: list[Listener] = []

    def make(family: int, kind: int, protocol: int) -> Listener:
        sockets.append(Listener(family, kind, protocol))
        return sockets[-1]

    def getaddrinfo(host: str, port: int, **hints: int) -> list[object]:
        if host == "nowhere":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        assert hints["type"] == socket.SOCK_STREAM
        return [
            (10, hints["type"], 6, "", (host, port)),
            (2, hints["type"], 6, "", ("other", port)),
        ]

    monkeypatch.setattr(socket, "socket", make)
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return sockets


@pytest.mark.parametrize("said", [{}, {"shares_port": False}, {"shares_port": True}])
def test_a_port_is_shared_where_that_is_said_alone(
    made: list[Listener], said: dict[str, bool]
) -> None:
    bound = bind("h", 8000, TIMERS, **said)
    (listener,) = made
    assert cast(object, bound) is listener
    assert server_of(listener, None, BOUNDS).port == 8000
    assert (listener.kind, listener.bound) == ((10, socket.SOCK_STREAM, 6), ("h", 8000))
    assert listener.backlog >= 128
    before = {name for level, name in listener.options_when_bound if level == socket.SOL_SOCKET}
    assert socket.SO_REUSEADDR in before
    assert (socket.SO_REUSEPORT in before) is said.get("shares_port", False)
    assert not listener.is_closed


def test_a_client_that_vanished_or_takes_nothing_loses_its_connection_in_time(
    made: list[Listener],
) -> None:
    bind("h", 0, TIMERS)
    (listener,) = made
    tcp = {name: each for (level, name), each in listener.options.items() if level == 6}
    assert listener.options[socket.SOL_SOCKET, socket.SO_KEEPALIVE] == 1
    silent_s = tcp[socket.TCP_KEEPIDLE] + tcp[socket.TCP_KEEPINTVL] * tcp[socket.TCP_KEEPCNT]
    assert TIMERS.client_write_s <= silent_s <= TIMERS.client_write_s + 4
    assert tcp[socket.TCP_USER_TIMEOUT] == 10_000  # ms
    assert listener.options[socket.SOL_SOCKET, socket.SO_SNDBUF] == 131_072


@pytest.mark.parametrize(("host", "port"), [("h", 1), ("nowhere", 8000)])
def test_where_it_cannot_listen_one_line_says_where_and_what_to_do(
    made: list[Listener], host: str, port: int
) -> None:
    with pytest.raises(ConfigurationError, match=f"^--http-port: cannot bind {host}:{port}: [NP]"):
        bind(host, port, TIMERS)
    assert all(listener.is_closed for listener in made)


def test_a_body_may_be_as_large_and_as_late_as_a_route_takes_it_and_a_little_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda what: (1000, 1000))
    bounds = bounds_of(500, 7.0)
    assert bounds.max_message_bytes >= MAX_HEAD_BYTES + 2 * 500, "it hears why it is too large"
    assert bounds.body_patience_s > 7.0, "or too slow"
    assert bounds.max_connections == 500


class Uvicorn:
    """What it is told, in place of sockets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patience_s: float | None = None  # when it was to end
        self.ended_at_s = 0.0
        self.sockets: object = None
        told = self

        async def startup(self: uvicorn.Server, sockets: object = None) -> None:
            self.started, told.sockets = True, sockets

        async def shutdown(self: uvicorn.Server, sockets: object = None) -> None:
            told.patience_s = self.config.timeout_graceful_shutdown
            told.ended_at_s = asyncio.get_running_loop().time()

        monkeypatch.setattr(uvicorn.Server, "startup", startup)
        monkeypatch.setattr(uvicorn.Server, "shutdown", shutdown)


class Peer(Transport):
    """A client's, on this machine."""

    def __init__(self, protocol: BoundedHttpProtocol) -> None:
        super().__init__(protocol)
        self.protocol = protocol

    def get_extra_info(self, name: str, default: object = None) -> object:
        return ("127.0.0.1", 7) if name in ("peername", "sockname") else default


class Tls:
    """A listener that listens until it is cancelled."""

    def __init__(self, bound: object, certificate: object, make: object, max_waiting: int) -> None:
        self.max_waiting = max_waiting
        self.ends = list[str]()
        listeners.append(self)

    async def run(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.ends.append("cancelled")


listeners: list[Tls] = []


async def asked(scope: Scope, receive: Receive, send: Send) -> None:
    """Tells who asks, and how."""
    said = f"{scope['client'][0]} {scope['scheme']}".encode()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": said, "more_body": False})


def server_of(bound: Listener, certificate: Certificate | None, bounds: Bounds) -> HttpServer:
    untaken = Untaken(lambda: 0.0)
    return HttpServer(asked, cast(socket.socket, bound), bounds, untaken, certificate)


@pytest.mark.parametrize("is_tls", [False, True])
@pytest.mark.parametrize(("patience_s", "whole_s"), [(0.25, 1), (3.0, 3), (7.5, 8)])
def test_at_its_end_answers_have_all_the_time_that_is_given(
    monkeypatch: pytest.MonkeyPatch, is_tls: bool, patience_s: float, whole_s: int
) -> None:
    bound = Listener(2, 1, 6)
    monkeypatch.setattr(http_server, "TlsListener", Tls)
    listeners.clear()

    async def end() -> None:
        told = Uvicorn(monkeypatch)
        before = signal.getsignal(signal.SIGTERM)
        server = server_of(bound, cast(Certificate, object()) if is_tls else None, BOUNDS)
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(server.serve())
            await asyncio.sleep(5.5)
            assert signal.getsignal(signal.SIGTERM) is before, "signals are the process's"
            assert not bound.is_closed
            await server.stop(patience_s)
            await serving
        assert told.patience_s == whole_s
        assert told.ended_at_s == 5.5, "at once"
        assert told.sockets == ([] if is_tls else [bound])

    run_virtually(end())
    assert bound.is_closed
    assert [each.ends for each in listeners] == [["cancelled"]] * is_tls
    assert [each.max_waiting for each in listeners] == [2] * is_tls


def test_what_a_client_says_of_itself_is_not_believed_and_nothing_is_said_of_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor is more than one connection taken where there is to be one."""
    head = b"GET / HTTP/1.1\r\nx-forwarded-for: 6.6.6.6\r\nx-forwarded-proto: https\r\n\r\n"

    async def ask() -> tuple[bytes, bool]:
        Uvicorn(monkeypatch)
        server = server_of(Listener(2, 1, 6), None, BOUNDS._replace(max_connections=1))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(server.serve())
            await asyncio.sleep(1.0)
            connections = list[Peer]()
            for _ in range(2):
                protocol = cast(BoundedHttpProtocol, server._uvicorn.protocol())
                connections.append(Peer(protocol))
                protocol.connection_made(connections[-1])
            one, other = connections
            one.protocol.data_received(head)
            await asyncio.sleep(1.0)
            await server.stop(1.0)
        return one.written, other.was_aborted

    answer, was_aborted = run_virtually(ask())
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"\r\n127.0.0.1 http\r\n" in answer
    assert b"\r\nserver:" not in answer.lower()
    assert was_aborted


def test_few_connections_still_leave_a_place_for_a_handshake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "TlsListener", Tls)
    listeners.clear()

    async def end() -> None:
        Uvicorn(monkeypatch)
        bounds = BOUNDS._replace(max_connections=3)
        server = server_of(Listener(2, 1, 6), cast(Certificate, object()), bounds)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(server.serve())
            await asyncio.sleep(1.0)
            await server.stop(1.0)

    run_virtually(end())
    assert [each.max_waiting for each in listeners] == [1]
