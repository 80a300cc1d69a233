"""One HTTP request and its response, over ASGI: bounded reading, and writing that waits."""

import asyncio
import enum
import logging
import math
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Final, Protocol

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from diptych.errors import (
    RETRY_LATER_S,
    DiptychError,
    InvalidRequestError,
    QueueFullError,
    SlowClientError,
)
from diptych.tenant import NOBODY, Tenant
from router.frontend.http.answer_form import failed_stream
from router.frontend.http.errors import ErrorAnswer, RefusedError, answer_to, bug
from router.frontend.http.json_parts import CHARACTERS_A_TURN, json_parts, pieces
from router.frontend.validation import check_request_id
from router.untaken import End, Taker

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER: Final = "x-request-id"
TENANT: Final = "diptych.tenant"  # in the scope, where callers are known
REQUEST_ID: Final = "diptych.request_id"  # in the scope, where every response has an id
SEND: Final = "diptych.send"  # the server's own, for what is behind a response's head
CONNECTION: Final = "diptych.connection"  # in the scope, where it can be written to at once
TIMEOUT_HEADER: Final = "x-request-timeout"
_MAX_TIMEOUT_S: Final = 1_000_000
_TRACE_HEADERS: Final = ("traceparent", "tracestate")
_AT_ONCE_BYTES: Final = 65_536  # as much as a connection keeps without anybody's waiting
PIECE_BYTES: Final = 262_144  # of a larger body
_WRITE_S: Final = 30.0  # where nobody says it
_STREAM_HEADERS: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # a proxy would hold tokens back
}


class _Sent(enum.Enum):
    """How much of a response the client was sent."""

    NOTHING = enum.auto()
    HEAD = enum.auto()  # of a whole answer
    EVENTS = enum.auto()
    ALL = enum.auto()


def check_encoding(headers: Mapping[str, str]) -> None:
    """Bodies are bounded as they come, so none may come compressed. Raises RefusedError."""
    encoding = headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        message = f"the body has to come as it is, not with content-encoding {encoding[:32]}"
        raise RefusedError(415, message, "unsupported_media_type")
    coding = headers.get("transfer-encoding", "chunked")  # of several the first; the last is that
    if coding.strip().lower() != "chunked":
        message = f"the body may come in chunks, not with transfer-encoding {coding[:32]}"
        raise RefusedError(501, message, "not_served")


def _text_of(value: str) -> str:
    """What a header says, of whose bytes each is a character there: UTF-8, unless it cannot be."""
    try:
        return value.encode("latin-1").decode()
    except UnicodeDecodeError:
        return value


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


class Connection(Protocol):
    """Of the client that is being answered, past ASGI."""

    @property
    def is_there(self) -> bool:
        """Whether the client has not left in the middle of the answer."""
        ...

    def cut(self) -> None:
        """End it at once; what the client has not taken is dropped."""
        ...

    @property
    def taker(self) -> Taker:
        """The client, as far as answers wait for it; what the connection keeps counts."""
        ...

    @property
    def at_once_bytes(self) -> int:
        """Of a body are written before the connection says whether it has taken them."""
        ...

    @property
    def takes_more(self) -> bool:
        """Whether the client is there and is not behind, in the middle of such a body."""
        ...

    def write_piece(self, piece: bytes) -> None:
        """Send it. While it ``takes_more``."""
        ...


class BodyRoom:
    """Bounds the bytes of the bodies that are being read. Event loop only.

    They count as they come: what a client only announces takes no room from others. The
    first ``free_bytes`` of each body do not: large ones that stop midway keep out no small
    one, and how many there are is bounded by the server's connections.
    Invariant: what a body acquired it releases when it is read, or refused.
    """

    def __init__(
        self, max_bytes: int, max_all_bytes: int, patience_s: float, free_bytes: int = 65_536
    ) -> None:
        """No body has more than ``max_bytes``, nor takes longer than ``patience_s`` to come."""
        self.max_bytes = max_bytes
        self.patience_s = patience_s
        self._max_all_bytes = max_all_bytes
        self._free_bytes = free_bytes
        self._num_bytes = 0

    def check(self, num_bytes: int) -> None:
        """Raise RefusedError for a body of so many bytes."""
        if num_bytes > self.max_bytes:
            raise RefusedError(
                413,
                f"the body has {num_bytes} bytes or more, at most {self.max_bytes} are read",
                "request_too_large",
            )

    def acquire(self, num_bytes: int, num_before: int) -> None:
        """Count what came of a body after so much. Raises QueueFullError: it is not counted."""
        more = self._counted(num_before + num_bytes) - self._counted(num_before)
        if self._num_bytes + more > self._max_all_bytes:
            raise QueueFullError(
                f"bodies of {self._num_bytes} bytes are being read", retry_after_s=RETRY_LATER_S
            )
        self._num_bytes += more

    def release(self, num_bytes: int) -> None:
        """Forget a body of which so much was counted."""
        self._num_bytes -= self._counted(num_bytes)

    def _counted(self, num_bytes: int) -> int:
        return max(0, num_bytes - self._free_bytes)


class Exchange:
    """Owned by the task that answers the request; writing waits for the client."""

    __slots__ = (
        "_connection",
        "_is_amid",
        "_receive",
        "_send",
        "_send_body",
        "_sent",
        "_write_s",
        "headers",
        "request_id",
        "taken_s",
        "tenant",
        "write_failure",
    )

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, write_s: float = _WRITE_S
    ) -> None:
        """``write_s``: the client's time for each piece of a large answer."""
        self.headers = Headers(scope=scope)
        self.request_id: str = scope.get(REQUEST_ID) or uuid.uuid4().hex
        """Sent back in any case; the client's, once ``take_request_id`` found it good."""
        self.tenant: Tenant = scope.get(TENANT, NOBODY)
        self.write_failure: Callable[[ErrorAnswer], Iterable[str]] = failed_stream
        """How the stream that is being sent says that it broke off."""
        self.taken_s = -math.inf
        """When the client last took a part of a large piece, on the loop's clock."""
        self._receive = receive
        self._send = send
        self._send_body: Send = scope.get(SEND, send)
        self._connection: Connection | None = scope.get(CONNECTION)
        self._write_s = write_s
        self._is_amid = False  # what was sent ends in the middle of an event
        self._sent = _Sent.NOTHING

    def take_request_id(self) -> None:
        """Go by the client's own id, if it sent one. Raises InvalidRequestError."""
        given = self.headers.get(REQUEST_ID_HEADER)
        if given is None:
            return
        given = _text_of(given)
        try:
            check_request_id(given)
        except InvalidRequestError as error:
            message = error.message.partition(": ")[2]
            raise InvalidRequestError(message, field=REQUEST_ID_HEADER) from None
        self.request_id = given

    @property
    def request_id_header(self) -> str:
        """The id as it is sent back: the very bytes that the client sent, each as a character."""
        given = self.headers.get(REQUEST_ID_HEADER, "")
        return given if _text_of(given) == self.request_id else self.request_id

    @property
    def has_begun(self) -> bool:
        """Whether the client was sent anything."""
        return self._sent is not _Sent.NOTHING

    @property
    def taker(self) -> Taker | None:
        """The client, as far as answers wait for it; None: nobody counts that."""
        return None if self._connection is None else self._connection.taker

    def leave_if_cut(self) -> bool:
        """End the connection whose client was too slow to get any more; whether it was."""
        if self._connection is None or not self._connection.taker.was_cut:
            return False
        self._connection.cut()
        return True

    def read_deadline_s(self) -> float | None:
        """When the client wants no answer any more, on the monotonic clock.

        Raises InvalidRequestError.
        """
        given = self.headers.get(TIMEOUT_HEADER)
        if given is None:
            return None
        try:
            timeout_s = float(given)
        except ValueError:
            timeout_s = -1.0
        if not 0 < timeout_s <= _MAX_TIMEOUT_S:
            raise InvalidRequestError(
                f"should be seconds, above 0 and at most {_MAX_TIMEOUT_S}", field=TIMEOUT_HEADER
            )
        return time.monotonic() + timeout_s

    @property
    def trace_metadata(self) -> tuple[tuple[str, str], ...]:
        """The client's W3C trace context."""
        return tuple((name, self.headers[name]) for name in _TRACE_HEADERS if name in self.headers)

    async def read_json_bytes(self, room: BodyRoom) -> bytes:
        """The body, which has to be JSON by its type.

        Raises:
            RefusedError: it is of another type, compressed, too large or too slow.
            QueueFullError: too many are being read.
            ClientGoneError: it will not come.
        """
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # a browser sends others from any page, unasked
            raise RefusedError(
                415, "the body has to be of content-type application/json", "unsupported_media_type"
            )
        check_encoding(self.headers)
        length = self.headers.get("content-length")
        if length is not None:
            room.check(int(length))  # its digits were checked
        try:
            async with asyncio.timeout(room.patience_s):
                return await self._read(room)
        except TimeoutError:
            raise RefusedError(
                408, f"the body did not come within {room.patience_s:g} s", "request_timeout"
            ) from None

    async def gone(self) -> None:
        """Return when the client has left, or has its answer. After the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def send_json(
        self, content: Mapping[str, object], status: int = 200, retry_after_s: int | None = None
    ) -> None:
        """The whole response; other tasks run while a large one is written.

        Returns when the connection has taken it, but for what it keeps of a small one.

        Raises SlowClientError: the client did not take it, and has lost its connection.
        """
        body = await _written(content)
        del content  # much larger than its text; that may wait for long
        headers = {"content-type": "application/json", "content-length": str(len(body))}
        if retry_after_s is not None:
            headers["retry-after"] = str(retry_after_s)
        if len(body) > _AT_ONCE_BYTES:
            await self._send_large(status, headers, body)
            return
        await self._begin(status, headers, _Sent.HEAD)
        await self._write(bytes(body), more_body=False)

    async def send_events(self, parts: Iterable[str]) -> bool:
        """As ``send_piece``, in turns with other tasks; whether there is anything to send.

        ``parts`` are of whole events, and are made one after the other.
        """
        last = await self._send_all_but_last(parts)
        if last:
            await self.send_piece(last)
        return bool(last)

    async def send_piece(self, events: bytes) -> None:
        """More of a stream of events, which begins with the first."""
        if self._sent is _Sent.NOTHING:
            await self._begin(200, _STREAM_HEADERS, _Sent.EVENTS)
        if len(events) <= _AT_ONCE_BYTES:
            await self._write(events, more_body=True)
            return
        with self._waiting(len(events)):
            await self._write(events, more_body=True)

    @property
    def takes_more(self) -> bool:
        """Whether ``write_piece`` may be called now, in the middle of a stream."""
        connection = self._connection
        return connection is not None and self._sent is _Sent.EVENTS and connection.takes_more

    def write_piece(self, events: bytes) -> None:
        """As ``send_piece``, at once. While no other piece is being sent."""
        assert self._connection is not None
        self._connection.write_piece(events)

    async def end_stream(self) -> None:
        """No more events."""
        await self._write(b"", more_body=False)

    async def fail(self, error: Exception) -> None:
        """Tell the client what went wrong: as the response, or as an event before the end.

        A response that is complete stays so; a whole one that is not is no place for it, nor is
        the middle of an event: there the connection ends.
        """
        if isinstance(error, DiptychError | RefusedError):
            answer = answer_to(error)
        else:
            logger.error("request crashed", exc_info=error, extra={"request": self.request_id})
            answer = bug(self.request_id)
        if self._sent is _Sent.NOTHING:
            await self.send_answer(answer)
        elif self._is_amid:
            self._cut("")
        elif self._sent is _Sent.EVENTS:
            last = await self._send_all_but_last(self.write_failure(answer))
            await self._write(last, more_body=False)

    async def send_answer(self, answer: ErrorAnswer) -> None:
        """A refusal as the whole response."""
        await self.send_json(answer.content, answer.status, answer.retry_after_s)

    async def _read(self, room: BodyRoom) -> bytes:
        data = bytearray()
        try:
            while True:
                message = await self._receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                piece = message.get("body", b"")
                room.check(len(data) + len(piece))
                room.acquire(len(piece), len(data))
                data += piece
                if not message.get("more_body", False):
                    return bytes(data)
        finally:
            room.release(len(data))

    async def _send_large(self, status: int, headers: Mapping[str, str], body: bytearray) -> None:
        """A whole response as fast as its client takes it. Raises SlowClientError.

        ``write_s`` is for each piece; what one leaves of it is for those behind. The last is
        empty: it waits for the one before it.
        """
        try:
            with self._waiting(len(body), self._cut) as take:
                await self._send_pieces(status, headers, body, take)
        except TimeoutError:
            if self._connection is not None:
                self._connection.cut()
            raise SlowClientError(
                f"the client took less than {PIECE_BYTES} bytes of its answer in "
                f"{self._write_s:g} s"
            ) from None

    async def _send_pieces(
        self,
        status: int,
        headers: Mapping[str, str],
        body: bytearray,
        take: Callable[[int], None],
    ) -> None:
        began_s = asyncio.get_running_loop().time()
        async with asyncio.timeout(self._write_s) as patience:
            await self._begin(status, headers, _Sent.HEAD)
            begins = range(0, len(body) + PIECE_BYTES, PIECE_BYTES)
            for num_before, begin in enumerate(begins):
                patience.reschedule(began_s + max(1, num_before) * self._write_s)
                piece = bytes(body[begin : begin + PIECE_BYTES])
                await self._write(piece, more_body=begin < len(body))
                if self.leave_if_cut():
                    raise SlowClientError("the client was the slowest, and too much waited for all")
                if self._connection is not None and not self._connection.is_there:
                    raise asyncio.CancelledError
                take(len(piece))

    def _cut(self, why: str) -> None:
        if self._connection is not None:
            self._connection.cut()

    @contextmanager
    def _waiting(self, num_bytes: int, end: End | None = None) -> Iterator[Callable[[int], None]]:
        """Count them as waiting until the end of the block, or until they were taken: say which.

        With an ``end`` the client that is cut off meanwhile loses its connection by it.
        """
        taker = self.taker
        if taker is None:
            yield lambda num_taken: None
            return
        num_left = num_bytes

        def take(num_taken: int) -> None:
            nonlocal num_left
            num_left -= num_taken
            taker.take(num_taken)

        taker.request_id = self.request_id
        with ExitStack() as ending:
            if end is not None:
                ending.enter_context(taker.ending_by(end))
            taker.wait(num_bytes)
            try:
                yield take
            finally:
                take(num_left)

    async def _begin(self, status: int, headers: Mapping[str, str], sent: _Sent) -> None:
        every = {**headers, REQUEST_ID_HEADER: self.request_id_header}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in every.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})
        self._sent = sent  # not before: one who gives up waiting has sent nothing

    async def _send_all_but_last(self, parts: Iterable[str]) -> bytes:
        """Of the pieces of events; gives the last one."""
        last = b""
        for piece in pieces(parts):
            if last:
                await self.send_piece(last)
                self._took_part()
                await asyncio.sleep(0)
            last = piece
        return last

    def _took_part(self) -> None:
        """More of it follows."""
        self._is_amid = True
        self.taken_s = asyncio.get_running_loop().time()

    async def _write(self, body: bytes, *, more_body: bool) -> None:
        most = PIECE_BYTES if self._connection is None else self._connection.at_once_bytes
        begin = 0
        while len(body) - begin > most:
            await self._write_part(body[begin : begin + most], more_body=True)
            self._took_part()
            begin += most
        await self._write_part(body[begin:], more_body=more_body)
        self._is_amid = False
        if not more_body:
            self._sent = _Sent.ALL

    async def _write_part(self, part: bytes, *, more_body: bool) -> None:
        await self._send_body({"type": "http.response.body", "body": part, "more_body": more_body})


async def _written(content: Mapping[str, object]) -> bytearray:
    """JSON, in turns with other tasks; never there twice, as parts and as a whole."""
    body = bytearray()
    num_characters = 0
    for part in json_parts(content):
        body += part.encode()
        num_characters += len(part)
        if num_characters >= CHARACTERS_A_TURN:
            num_characters = 0
            await asyncio.sleep(0)
    return body
