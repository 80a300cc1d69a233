"""HTTP/1.1 of one connection, with bounds on what a client may send and how long it may take."""

import asyncio
import json
from typing import Any, Final, NamedTuple

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from router.frontend.http.errors import RefusedError, answer_to
from router.frontend.http.exchange import CONNECTION, PIECE_BYTES
from router.untaken import Untaken

MAX_HEAD_BYTES: Final = 65_536
HEAD_PATIENCE_S: Final = 30.0
_KEPT_BYTES: Final = 65_536  # before a client is behind: uvloop's own bound without TLS
_TLS_AT_ONCE_BYTES: Final = 32_768  # what is larger goes to TCP, which says nothing of it, as one


class Bounds(NamedTuple):
    """Of each connection of a server, and of their number."""

    max_message_bytes: int
    """Of one request with its head, as they come; what is refused is read that far."""
    body_patience_s: float
    """After the head; longer than a route waits, whose refusal tells the client why."""
    max_connections: int


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's, which by itself keeps whatever a client sends, and waits for the rest.

    Invariant: as long as the client owes the rest of a request, a timer runs that ends
    the connection; between requests it is uvicorn's for idle ones. A head that is too long
    is answered with 400. What else breaks a bound ends the connection, and with it the
    work on its answer, if one is under way: so does a request that comes before the one
    before it is answered, which nobody's client sends. Another protocol that a request offers
    to go on with is ignored (RFC 9110, 7.8). What waits until its client takes it counts with all
    others'. Event loop only.
    """

    def __init__(self, bounds: Bounds, untaken: Untaken, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.taker = untaken.open("", self._look, lambda why: self.cut())
        """See :class:`router.frontend.http.exchange.Connection`."""
        self._num_unsent = 0  # bytes of ``taker`` that wait here
        self._bounds = bounds
        self._num_bytes = 0  # of the request
        self._num_idle_bytes = 0  # since the last that were of a body: a head, or trailers
        self._is_in_head = True
        self._plain_head = b""  # of a request that offers another protocol
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self.taker.client = ":".join(map(str, self.client or ()))
        if self._is_tls:  # by itself it is behind with 512 KiB beyond what is beneath TLS
            transport.set_write_buffer_limits(high=1, low=0)
        if len(self.connections) > self._bounds.max_connections:
            transport.abort()
        else:
            self._wait_for(HEAD_PATIENCE_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._stop_waiting()
        self._sent(self._num_unsent)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """See asyncio.Protocol."""
        super().pause_writing()
        self._sent(self._num_unsent)
        self._num_unsent = self._num_kept
        self.taker.wait(self._num_unsent)

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        self._sent(self._num_unsent)
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self._timer is None and not self._is_answering:
            self._wait_for(HEAD_PATIENCE_S)  # even an empty line ends the time to be idle
        self._num_bytes += len(data)
        self._num_idle_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        if self.transport.is_closing():
            return
        if self._num_idle_bytes > MAX_HEAD_BYTES and self._is_in_head:
            self.send_400_response("The request's head is too long.")
        elif (
            self._num_idle_bytes > MAX_HEAD_BYTES
            or self._num_bytes > self._bounds.max_message_bytes
        ):
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """See HttpToolsProtocol; it would do so in the middle of another answer, and as text."""
        if self._is_answering:
            self.transport.abort()
            return
        refused = answer_to(RefusedError(400, msg, "invalid_http"))
        body = json.dumps(refused.content).encode()
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def on_message_begin(self) -> None:
        """See httptools."""
        if self._is_answering:
            raise ValueError("the answer before it is not complete")  # no more is parsed
        super().on_message_begin()
        if self._timer is None:
            self._wait_for(HEAD_PATIENCE_S)

    def on_headers_complete(self) -> None:
        """See httptools."""
        if self.parser.should_upgrade():
            self._plain_head = self._without_upgrade()
            return
        self.scope[CONNECTION] = self  # type: ignore[typeddict-unknown-key]
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":
            _send_unframed(self.cycle)
        self._is_in_head = False
        self._num_idle_bytes = 0
        self._wait_for(self._bounds.body_patience_s)

    def on_body(self, body: bytes) -> None:
        """See httptools."""
        super().on_body(body)
        self._num_idle_bytes = 0

    def on_message_complete(self) -> None:
        """See httptools."""
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._is_in_head = True
        self._num_bytes = self._num_idle_bytes = 0
        self._stop_waiting()
        if self.cycle.response_complete:  # a refusal, after which it was idle until this came
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    @property
    def is_there(self) -> bool:
        """See :class:`router.frontend.http.exchange.Connection`."""
        return not self.cycle.disconnected

    def cut(self) -> None:
        """See :class:`router.frontend.http.exchange.Connection`."""
        self.transport.abort()

    @property
    def at_once_bytes(self) -> int:
        """See :class:`router.frontend.http.exchange.Connection`."""
        return _TLS_AT_ONCE_BYTES if self._is_tls else PIECE_BYTES

    @property
    def takes_more(self) -> bool:
        """See :class:`router.frontend.http.exchange.Connection`."""
        cycle = self.cycle
        return bool(
            cycle.chunked_encoding
            and not cycle.response_complete
            and not cycle.disconnected
            and not self.flow.write_paused
        )

    def write_piece(self, piece: bytes) -> None:
        """See :class:`router.frontend.http.exchange.Connection`; the same as uvicorn would send."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))

    def _look(self) -> None:
        self._sent(self._num_unsent - self._num_kept)

    @property
    def _num_kept(self) -> int:
        """Bytes of a client that is behind. What is beneath TLS nobody tells; it is full."""
        return self.transport.get_write_buffer_size() + (_KEPT_BYTES if self._is_tls else 0)

    @property
    def _is_tls(self) -> bool:
        return self.scheme == "https"

    def _sent(self, num_bytes: int) -> None:
        """So many of those that wait here do so no longer."""
        if num_bytes > 0:
            self._num_unsent -= num_bytes
            self.taker.take(num_bytes)

    def _parse(self, data: bytes) -> None:
        """Parse ``data``; a head that offers another protocol a second time, without that.

        The parser would take all behind such a head for the other protocol.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn
            self._parse(self._plain_head + data[offer.args[0] :])

    def _without_upgrade(self) -> bytes:
        method = self.parser.get_method()
        if method == b"CONNECT":
            raise ValueError("no tunnel is opened")
        version = self.parser.get_http_version().encode()
        fields = [b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade"]
        return b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, b"".join(fields))

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait_for(self, patience_s: float) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(patience_s, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _send_unframed(cycle: RequestResponseCycle) -> None:
    """Send no chunks, which HTTP/1.0 does not know: the end of the connection is the body's."""
    send = cycle.send

    async def send_unframed(message: Any) -> None:
        if message["type"] == "http.response.body":
            cycle.expected_content_length = len(message.get("body", b""))  # whatever comes is right
        await send(message)

    cycle.chunked_encoding = False
    cycle.send = send_unframed  # type: ignore[method-assign]
