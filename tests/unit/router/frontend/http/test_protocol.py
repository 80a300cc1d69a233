"""One connection: what a client may send on it, and how long it may take."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from router.frontend.http.exchange import CONNECTION
from router.frontend.http.protocol import (
    HEAD_PATIENCE_S,
    MAX_HEAD_BYTES,
    BoundedHttpProtocol,
    Bounds,
)
from router.untaken import Untaken
from tests.virtual_time import run_virtually

BOUNDS = Bounds(max_message_bytes=1_000_000, body_patience_s=40.0, max_connections=2)
KEEP_ALIVE_S = 60
GET = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}"
CHUNKED = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n"
LARGE = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 900000\r\n\r\n"


class Transport(asyncio.Transport):
    """Writes into memory; like the real one it tells of its end in the next turn."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self.written = b""
        self.was_aborted = False
        self.num_unsent = 0
        self._protocol = protocol
        self._is_closing = False

    def write(self, data: Any) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return self.num_unsent

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    def abort(self) -> None:
        self.was_aborted = True
        self.close()

    def pause_reading(self) -> None:
        """Nothing is read but what a test hands over."""

    def resume_reading(self) -> None:
        """See ``pause_reading``."""


class Server:
    """Makes connections; its answer to each request is "ok", once ``may_answer``."""

    def __init__(self, app: ASGIApp | None = None) -> None:
        """``app`` answers in its place."""
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.num_answered = 0
        self.num_left = 0
        self.untaken = Untaken(lambda: 0.0)
        self._state = ServerState()
        self._config = uvicorn.Config(
            app or self._app,
            ws="none",
            interface="asgi3",
            log_config=None,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )

    def connect(self) -> tuple[BoundedHttpProtocol, Transport]:
        made = BoundedHttpProtocol(
            BOUNDS, self.untaken, config=self._config, server_state=self._state, app_state={}
        )
        transport = Transport(made)
        made.connection_made(transport)
        return made, transport

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self.may_answer.is_set():
            while (await receive())["type"] != "http.disconnect":
                pass
            self.num_left += 1
            return
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok", "more_body": False})
        self.num_answered += 1


async def send_piece(send: Send, piece: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": piece, "more_body": more})


@pytest.mark.parametrize(
    ("version", "headers", "is_at_once"),
    [
        (b"1.1", [], True),
        (b"1.1", [(b"content-length", b"6")], False),
        (b"1.0", [(b"content-length", b"6")], False),
    ],
)
def test_pieces_of_a_body_of_no_told_length_may_be_written_at_once(
    version: bytes, headers: list[tuple[bytes, bytes]], is_at_once: bool
) -> None:
    """Between pieces that uvicorn sends, while the client is there and takes them."""
    open_: list[bool] = []

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        connection = scope[CONNECTION]
        assert await receive()
        open_.append(connection.takes_more)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send_piece(send, b"a")
        open_.append(connection.takes_more)
        if connection.takes_more:
            connection.write_piece(b"bcdefghijklmnopqr")
            connection.pause_writing()
            open_.append(connection.takes_more)
            connection.resume_writing()
            open_.append(connection.takes_more)
            await send_piece(send, b"s", more=False)
        else:
            await send_piece(send, b"bcdes", more=False)
        open_.append(connection.takes_more)

    async def main() -> None:
        connection, transport = Server(answer).connect()
        connection.data_received(GET.replace(b"1.1", version))
        await turns()
        transport.close()
        await turns()
        _, _, body = transport.written.partition(b"\r\n\r\n")
        if is_at_once:
            assert open_ == [False, True, False, True, False]
            assert body == b"1\r\na\r\n11\r\nbcdefghijklmnopqr\r\n1\r\ns\r\n0\r\n\r\n"
        else:
            assert (open_, body) == ([False, False, False], b"abcdes")

    run_virtually(main())


def test_a_body_of_no_told_length_ends_with_the_connection_for_http_1_0() -> None:
    """Which knows no chunks (RFC 9112, 6.1)."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        assert await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send_piece(send, b"a")
        assert not scope[CONNECTION].takes_more
        await send_piece(send, b"bc")
        await send_piece(send, b"", more=False)

    async def main() -> None:
        connection, transport = Server(answer).connect()
        connection.data_received(b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
        await turns()
        head, _, body = transport.written.partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head
        assert b"connection: close" in head
        assert (body, transport.is_closing()) == (b"abc", True)
        assert not transport.was_aborted

    run_virtually(main())


def test_a_client_that_is_cut_off_is_there_no_more() -> None:
    there: list[bool] = []

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        connection = scope[CONNECTION]
        assert await receive()
        headers = [(b"content-length", b"9")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send_piece(send, b"a")
        connection.pause_writing()
        there.append(connection.is_there)
        connection.cut()
        await send_piece(send, b"b")
        there.append(connection.is_there)

    async def main() -> None:
        connection, transport = Server(answer).connect()
        connection.data_received(GET)
        await turns()
        assert (there, transport.was_aborted) == ([True, False], True)
        assert transport.written.endswith(b"\r\n\r\na"), "nothing more is kept for it"

    run_virtually(main())


def test_nothing_is_written_at_once_for_a_client_that_has_left() -> None:
    open_: list[bool] = []

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        assert await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send_piece(send, b"a")
        open_.append(scope[CONNECTION].takes_more)
        assert (await receive())["type"] == "http.disconnect"
        open_.append(scope[CONNECTION].takes_more)

    async def main() -> None:
        connection, transport = Server(answer).connect()
        connection.data_received(GET)
        await turns()
        transport.close()
        await turns()
        assert open_ == [True, False]

    run_virtually(main())


Steps = Callable[[Server, BoundedHttpProtocol, Transport], Awaitable[None]]


def on_a_connection(steps: Steps) -> None:
    """Run ``steps`` with a virtual clock, and end the connection."""

    async def main() -> None:
        server = Server()
        connection, transport = server.connect()
        await steps(server, connection, transport)
        transport.close()
        await turns()

    run_virtually(main())


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_connection_serves_one_request_after_the_other() -> None:
    async def steps(server: Server, connection: BoundedHttpProtocol, transport: Transport) -> None:
        for request in (GET, POST, CHUNKED + b"0\r\n\r\n", POST):
            connection.data_received(request)
            await turns()
            await asyncio.sleep(KEEP_ALIVE_S - 1)
        assert server.num_answered == 4
        assert not transport.is_closing()
        await asyncio.sleep(2)
        assert transport.is_closing()

    on_a_connection(steps)


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (CHUNKED + b"0\r\n", b"trailer: " + b"x" * 1000 + b"\r\n"),
        (CHUNKED + b"0\r\ntrailer: ", b"x" * 1000),
        (CHUNKED + b"2;extension=", b"x" * 1000),
        (CHUNKED, b"1\r\n{\r\n" * 200),
        (POST, b"\r\n" * 500),
        (GET, b"\r\n" * 500),
        (b"GET / HTTP/1.1\r\nx: ", b"x" * 1000),
    ],
)
@pytest.mark.parametrize("is_answered", [True, False])
def test_nothing_comes_without_end(begin: bytes, more: bytes, is_answered: bool) -> None:
    """Whether its answer is done or not: of no part of a request more than its bound is kept."""

    async def steps(server: Server, connection: BoundedHttpProtocol, transport: Transport) -> None:
        if not is_answered:
            server.may_answer.clear()
        connection.data_received(begin)
        await turns()
        num_bytes = 0
        while not transport.is_closing():
            assert num_bytes <= BOUNDS.max_message_bytes
            connection.data_received(more)
            num_bytes += len(more)
        assert transport.written.count(b"HTTP/1.1") <= 2

    on_a_connection(steps)


def test_a_head_that_is_too_long_is_told_so() -> None:
    async def steps(server: Server, connection: BoundedHttpProtocol, transport: Transport) -> None:
        connection.data_received(b"GET / HTTP/1.1\r\nx: " + b"x" * MAX_HEAD_BYTES)
        assert transport.written.startswith(b"HTTP/1.1 400 ")
        head, _, body = transport.written.partition(b"\r\n\r\n")
        assert f"content-length: {len(body)}".encode() in head.split(b"\r\n")
        said = json.loads(body)["error"]
        assert said == {
            "message": "The request's head is too long.",
            "type": "invalid_request_error",
            "param": None,
            "code": "invalid_http",
        }
        assert not transport.was_aborted

    on_a_connection(steps)


def test_the_end_of_a_refused_body_does_not_count_as_the_next_ones_head() -> None:
    async def steps(server: Server, connection: BoundedHttpProtocol, transport: Transport) -> None:
        connection.data_received(LARGE)
        await turns()
        assert server.num_answered == 1
        connection.data_received(b"x" * 700_000)
        connection.data_received(b"x" * 200_000 + GET[:9])
        connection.data_received(GET[9:])
        await turns()
        assert server.num_answered == 2
        assert transport.written.count(b"HTTP/1.1 200 ") == 2

    on_a_connection(steps)


@pytest.mark.parametrize(
    ("pieces", "later", "patience_s"),
    [
        ([], b"", HEAD_PATIENCE_S),
        ([b"GET"], b" /", HEAD_PATIENCE_S),
        ([GET, b"\r\n"], b"\r\n", HEAD_PATIENCE_S),
        ([GET, GET[:5]], b"", HEAD_PATIENCE_S),
        ([LARGE], b"x", BOUNDS.body_patience_s),
        ([CHUNKED], b"2\r\n{}\r\n", BOUNDS.body_patience_s),
        ([CHUNKED + b"0\r\n"], b"trailer: x\r\n", BOUNDS.body_patience_s),
    ],
)
def test_nobody_is_waited_for_without_end(
    pieces: list[bytes], later: bytes, patience_s: float
) -> None:
    """Not even one who sends a little more, ``later``, just before the time is over."""

    async def steps(server: Server, connection: BoundedHttpProtocol, transport: Transport) -> None:
        for piece in pieces:
            connection.data_received(piece)
            await turns()
        await asyncio.sleep(patience_s - 1)
        assert not transport.is_closing()
        connection.data_received(later)
        await asyncio.sleep(2)
        assert transport.was_aborted

    on_a_connection(steps)


@pytest.mark.parametrize("is_at_once", [True, False])
@pytest.mark.parametrize("next_bytes", [GET, POST, b"GET", b"nonsense"])
def test_who_does_not_await_the_answer_ends_it(next_bytes: bytes, is_at_once: bool) -> None:
    """Nothing is queued, the work ends, and no other answer gets into its own."""

    async def steps(server: Server, connection: BoundedHttpProtocol, transport: Transport) -> None:
        server.may_answer.clear()
        for each in (POST + next_bytes,) if is_at_once else (POST, next_bytes):
            connection.data_received(each)
            await turns()
        assert transport.was_aborted
        assert transport.written == b""
        assert server.num_left == 1
        assert not connection.pipeline

    on_a_connection(steps)


def test_an_answer_may_take_longer_than_any_request() -> None:
    async def steps(server: Server, connection: BoundedHttpProtocol, transport: Transport) -> None:
        server.may_answer.clear()
        connection.data_received(POST)
        connection.data_received(b"\r\n")  # as some clients end a body
        await asyncio.sleep(10 * BOUNDS.body_patience_s)
        assert not transport.is_closing()

    on_a_connection(steps)


@pytest.mark.parametrize("cut", range(0, 160, 3))
def test_another_protocol_that_is_offered_is_ignored(cut: int) -> None:
    """As RFC 9110 has it in 7.8; wherever the packets end, the body stays a body."""
    body = b"GET /smuggled HTTP/1.1\r\nhost: a\r\n\r\n"
    offer = b"connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    head = b"POST /a HTTP/1.1\r\nhost: a\r\n%bcontent-length: %d\r\n\r\n"
    sent = head % (offer, len(body)) + body
    got: list[tuple[str, str, bytes]] = []

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        read, more = b"", True
        while more:
            message = await receive()
            read, more = read + message["body"], message["more_body"]
        assert b"upgrade" not in dict(scope["headers"])
        got.append((scope["method"], scope["path"], read))
        headers = [(b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send_piece(send, b"", more=False)

    async def main() -> None:
        connection, transport = Server(answer).connect()
        for piece in (sent[:cut], sent[cut:], GET):
            connection.data_received(piece)
            await turns()
        assert got == [("POST", "/a", body), ("GET", "/", b"")]
        assert not transport.is_closing()
        transport.close()
        await turns()

    run_virtually(main())


def test_a_last_request_that_offers_another_protocol_is_answered() -> None:
    async def steps(server: Server, connection: BoundedHttpProtocol, transport: Transport) -> None:
        offer = b"connection: close, upgrade\r\nupgrade: websocket\r\n\r\n"
        connection.data_received(GET.removesuffix(b"\r\n") + offer)
        await turns()
        assert transport.written.startswith(b"HTTP/1.1 200 ")
        assert transport.is_closing()

    on_a_connection(steps)


def test_no_tunnel_is_opened() -> None:
    async def steps(server: Server, connection: BoundedHttpProtocol, transport: Transport) -> None:
        connection.data_received(b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n")
        assert transport.written.startswith(b"HTTP/1.1 400 ")

    on_a_connection(steps)


def test_a_connection_is_idle_once_a_refused_body_has_ended() -> None:
    async def steps(server: Server, connection: BoundedHttpProtocol, transport: Transport) -> None:
        connection.data_received(LARGE)
        await turns()
        assert server.num_answered == 1
        connection.data_received(b"x" * 900_000)
        await asyncio.sleep(KEEP_ALIVE_S - 1)
        assert not transport.is_closing()
        await asyncio.sleep(2)
        assert transport.is_closing()

    on_a_connection(steps)


def test_connections_have_a_greatest_number() -> None:
    async def steps(server: Server, connection: BoundedHttpProtocol, transport: Transport) -> None:
        _, second = server.connect()
        _, third = server.connect()
        assert (second.is_closing(), third.was_aborted) == (False, True)
        await turns()
        second.close()
        await turns()
        _, fourth = server.connect()
        assert not fourth.is_closing()
        fourth.close()

    on_a_connection(steps)
