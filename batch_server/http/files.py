"""``/v1/files``: uploads in bounds, lists, contents."""

import asyncio
import errno
import logging
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AbstractContextManager, aclosing
from typing import Final

from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from batch_server.desk.checks import checked_page, checked_word
from batch_server.desk.files import CHUNK_BYTES, PURPOSE, FileDesk
from batch_server.http.asked import read_ascending, read_limit, refuse_browsers, tenant_of
from batch_server.http.forms import file_form, list_form
from batch_server.records import StoredFile
from diptych.errors import DiskFullError, InvalidRequestError, SlowClientError
from router.frontend.http.errors import RefusedError
from router.frontend.http.exchange import CONNECTION, Connection, check_encoding

logger = logging.getLogger(__name__)

_FORM_BYTES: Final = 2**16  # of an upload, beside the file
_MAX_FIELDS: Final = 16
_MOST_LISTED: Final = 10_000
# ENOENT: Python looks for a folder with its first temporary file, and found none with room.
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOENT})
_JSON_LINES: Final = "application/jsonl"
_CHARSETS: Final = frozenset({b"utf-8", b"utf8", b"us-ascii", b"ascii"})


class FileAnswers:
    """Answers about files. Event loop only; an upload is on disk before it is stored."""

    def __init__(self, files: FileDesk, max_file_bytes: int, write_s: float) -> None:
        """``write_s``: so long a client may take for a piece of a download."""
        self._files = files
        self._most = max_file_bytes + _FORM_BYTES
        self._write_s = write_s

    async def upload(self, request: Request) -> Response:
        """Store a file, which is there once the answer is."""
        refuse_browsers(request.headers)
        _check_form(request.headers)
        try:
            async with self._files.uploading(tenant_of(request)):
                return await self._upload(request)
        except SlowClientError as error:
            raise RefusedError(408, error.message, "request_timeout") from None

    async def list(self, request: Request) -> Response:
        """A page of the tenant's."""
        query = request.query_params
        limit = read_limit(query, _MOST_LISTED)
        asked = checked_page(limit, query.get("after"), _MOST_LISTED, kind="file")
        purpose = checked_word(query.get("purpose"), "purpose")
        ascending = read_ascending(query)
        found = await self._files.page(tenant_of(request), asked, purpose, ascending=ascending)
        return JSONResponse(list_form([file_form(file) for file in found], asked.limit))

    async def retrieve(self, request: Request) -> Response:
        """What is known of one."""
        return JSONResponse(file_form(await self._find(request)))

    async def content(self, request: Request) -> Response:
        """All of one, as fast as the client takes it."""
        file = await self._find(request)
        place = self._files.reading(tenant_of(request))
        return _Content(
            self._files.content(file),
            file.num_bytes,
            place,
            self._write_s,
            request.scope.get(CONNECTION),
        )

    async def delete(self, request: Request) -> Response:
        """It is gone once the answer is there."""
        file_id = request.path_params["file_id"]
        await self._files.delete(tenant_of(request), file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    async def _find(self, request: Request) -> StoredFile:
        return await self._files.find(tenant_of(request), request.path_params["file_id"])

    async def _upload(self, request: Request) -> Response:
        bounded = Request(request.scope, self._bounded(request.receive))
        try:
            form = await bounded.form(max_files=1, max_fields=_MAX_FIELDS)
        except HTTPException as error:
            raise InvalidRequestError(f"is no form: {error.detail}", field="body") from None
        except OSError as error:  # what came is on disk before it is stored
            if error.errno not in _NO_ROOM:
                raise
            extra = {"folder": tempfile.tempdir, "error": str(error)}
            logger.error("no room for temporary files", extra=extra)
            reason = "the disk of the server's temporary files is full: its operator has to "
            raise DiskFullError(f"{reason}make room, or to set TMPDIR") from None
        try:
            file = _read_form(form)
            stored = await self._files.store(
                tenant_of(request), file.filename or "", file.size or 0, _pieces(file)
            )
        finally:
            await form.close()
        return JSONResponse(file_form(stored))

    def _bounded(self, receive: Receive) -> Receive:
        """What comes, up to so many bytes of a body. Raises FileTooLargeError."""
        num_bytes = 0

        async def receive_bounded() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._most:
                raise self._files.too_large()
            return message

        return receive_bounded


class _Content(StreamingResponse):
    """Has a place while it is sent, and ends with its last byte.

    Starlette's own ends a moment after it; a client that has counted what it was promised asks
    for the next thing by then, in the middle of this answer as it seems.
    """

    def __init__(
        self,
        pieces: AsyncGenerator[bytes, None],
        num_bytes: int,
        place: AbstractContextManager[None],
        write_s: float,
        connection: Connection | None,
    ) -> None:
        headers = {"content-length": str(num_bytes), "x-content-type-options": "nosniff"}
        super().__init__(pieces, headers=headers, media_type=_JSON_LINES)
        self._pieces = pieces
        self._place = place
        self._write_s = write_s
        self._connection = connection

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises QueueFullError, before anything is sent."""
        with self._place:
            async with aclosing(self._pieces):
                await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        """See StreamingResponse."""
        try:
            head = {"type": "http.response.start", "status": self.status_code}
            await self._send(send, {**head, "headers": self.raw_headers})
            held = b""
            async for piece in self.body_iterator:
                if held:
                    body = {"type": "http.response.body", "body": held, "more_body": True}
                    await self._send(send, body)
                assert isinstance(piece, bytes)
                held = piece
            await self._send(send, {"type": "http.response.body", "body": held, "more_body": False})
        except TimeoutError:
            await self._cut()

    async def _send(self, send: Send, message: Message) -> None:
        """Raises TimeoutError: the client took less than a piece in that time."""
        async with asyncio.timeout(self._write_s):
            await send(message)

    async def _cut(self) -> None:
        """End the connection of a client that keeps its place and takes next to nothing."""
        logger.info("a download was cut off: its client takes too little at a time")
        while self._connection is not None and self._connection.is_there:
            self._connection.cut()
            await asyncio.sleep(0)


def _check_form(headers: Mapping[str, str]) -> None:
    """Of other forms all is kept in memory, and some charsets take minutes for a megabyte.

    Raises RefusedError, InvalidRequestError.
    """
    kind = headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "multipart/form-data":
        reason = "a file has to come as multipart/form-data"
        raise RefusedError(415, reason, "unsupported_media_type")
    check_encoding(headers)
    charset = parse_options_header(kind)[1].get(b"charset", b"utf-8")  # as the form's parser does
    if charset.lower() not in _CHARSETS:
        raise InvalidRequestError("is no form: its charset has to be utf-8", field="body")


def _read_form(form: FormData) -> UploadFile:
    """The file. Raises InvalidRequestError: another purpose, no file, or more than is served."""
    if form.get("purpose") != PURPOSE:
        raise InvalidRequestError(f"should be {PURPOSE}", field="purpose")
    unserved = next((name for name in form if name.startswith("expires_after")), None)
    if unserved is not None:
        raise InvalidRequestError("is not supported yet", field="expires_after")
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise InvalidRequestError("should be a file", field="file")
    return file


async def _pieces(file: UploadFile) -> AsyncIterator[bytes]:
    while data := await file.read(CHUNK_BYTES):
        yield data
