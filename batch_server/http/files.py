"""``/v1/files``: uploads in bounds, lists, contents."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final, NamedTuple

from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Message, Receive, Send

from batch_server.http.asked import (
    not_found,
    path_id,
    read_ascending,
    read_page,
    read_word,
    refuse_browsers,
)
from batch_server.http.forms import file_form, list_form
from batch_server.records import StoredFile, new_id
from batch_server.store.files import FileStore
from diptych.errors import RETRY_LATER_S, InvalidRequestError, QueueFullError
from router.frontend.http.errors import RefusedError
from router.frontend.http.exchange import TENANT

PURPOSE: Final = "batch"
_MOST_UPLOADS: Final = 16
_MOST_OF_TENANT: Final = 4
_CHUNK_BYTES: Final = 2**18
_FORM_BYTES: Final = 2**16  # of an upload, beside the file
_MAX_FIELDS: Final = 16
_MAX_NAME_CHARACTERS: Final = 256
_MOST_LISTED: Final = 10_000
_JSON_LINES: Final = "application/jsonl"


class UploadBounds(NamedTuple):
    """Of the files that clients upload."""

    max_file_bytes: int
    max_tenant_bytes: int
    patience_s: float


class FileAnswers:
    """Answers about files. Event loop only; one upload holds one chunk of it in memory."""

    def __init__(self, files: FileStore, bounds: UploadBounds, clock: Callable[[], float]) -> None:
        """``clock``: seconds of the Unix epoch."""
        self._files = files
        self._bounds = bounds
        self._clock = clock
        self._uploading: Counter[str] = Counter()  # by tenant

    async def upload(self, request: Request) -> Response:
        """Store a file, which is there once the answer is."""
        refuse_browsers(request.headers)
        _check_form(request.headers)
        tenant = _tenant(request)
        if self._uploading[tenant] >= _MOST_OF_TENANT or self._uploading.total() >= _MOST_UPLOADS:
            raise QueueFullError("many files are being uploaded", retry_after_s=RETRY_LATER_S)
        self._uploading[tenant] += 1
        try:
            async with asyncio.timeout(self._bounds.patience_s):
                return await self._upload(request)
        except TimeoutError:
            reason = f"the file did not come within {self._bounds.patience_s:g} s"
            raise RefusedError(408, reason, "request_timeout") from None
        finally:
            self._uploading[tenant] -= 1
            self._uploading += Counter()  # forgets those at 0

    async def list(self, request: Request) -> Response:
        """A page of the tenant's."""
        query = request.query_params
        asked = read_page(query, _MOST_LISTED, _MOST_LISTED)
        found = await self._files.page(
            _tenant(request),
            read_word(query, "purpose"),
            asked.after,
            asked.limit + 1,
            ascending=read_ascending(query),
        )
        return JSONResponse(list_form([file_form(file) for file in found], asked.limit))

    async def retrieve(self, request: Request) -> Response:
        """What is known of one."""
        return JSONResponse(file_form(await self._find(request)))

    async def content(self, request: Request) -> Response:
        """All of one, as fast as the client takes it."""
        file = await self._find(request)
        pieces = self._chunks(file) if file.batch_id is None else self._results(file)
        headers = {"content-length": str(file.num_bytes), "x-content-type-options": "nosniff"}
        return _Content(pieces, headers=headers, media_type=_JSON_LINES)

    async def delete(self, request: Request) -> Response:
        """It is gone once the answer is there."""
        file_id = path_id(request.path_params["file_id"], "file")
        if not await self._files.delete(_tenant(request), file_id):
            raise not_found("file", file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    async def _find(self, request: Request) -> StoredFile:
        file_id = path_id(request.path_params["file_id"], "file")
        file = await self._files.find(_tenant(request), file_id)
        if file is None:
            raise not_found("file", file_id)
        return file

    async def _upload(self, request: Request) -> Response:
        most = self._bounds.max_file_bytes + _FORM_BYTES
        bounded = Request(request.scope, _bounded(request.receive, most))
        try:
            form = await bounded.form(max_files=1, max_fields=_MAX_FIELDS)
        except HTTPException as error:
            raise InvalidRequestError(f"is no form: {error.detail}", field="body") from None
        try:
            file = await self._store(_tenant(request), _read_form(form))
        finally:
            await form.close()
        return JSONResponse(file_form(file))

    async def _store(self, tenant: str, uploaded: UploadFile) -> StoredFile:
        now_s = self._clock()
        file = StoredFile(
            file_id=new_id("file", now_s),
            tenant=tenant,
            purpose=PURPOSE,
            filename=_printable(uploaded.filename or "file"),
            created_s=int(now_s),
            num_bytes=uploaded.size or 0,
        )
        if file.num_bytes > self._bounds.max_file_bytes:
            raise too_large(self._bounds.max_file_bytes)
        number = 0
        try:
            if not await self._files.begin(file, self._bounds.max_tenant_bytes):
                reason = f"all files would have more than {self._bounds.max_tenant_bytes} bytes"
                raise RefusedError(413, f"{reason}: delete some", "storage_full", param="file")
            while data := await uploaded.read(_CHUNK_BYTES):
                await self._files.add_chunk(file.file_id, number, data)
                number += 1
            await self._files.finish(file.file_id)
        except BaseException:  # the client left, or the time is over
            await self._files.drop(file.file_id)
            raise
        return file

    async def _chunks(self, file: StoredFile) -> AsyncIterator[bytes]:
        number = 0
        while (data := await self._files.chunk(file.file_id, number)) is not None:
            yield data
            number += 1

    async def _results(self, file: StoredFile) -> AsyncIterator[bytes]:
        number = 0
        while lines := await self._files.results_after(file, number):
            number = lines[-1][0]
            for _, line in lines:
                yield line


class _Content(StreamingResponse):
    """Ends with its last byte.

    Starlette's own ends a moment after it; a client that has counted what it was promised asks
    for the next thing by then, in the middle of this answer as it seems.
    """

    async def stream_response(self, send: Send) -> None:
        """See StreamingResponse."""
        head = {"type": "http.response.start", "status": self.status_code}
        await send({**head, "headers": self.raw_headers})
        held = b""
        async for piece in self.body_iterator:
            if held:
                await send({"type": "http.response.body", "body": held, "more_body": True})
            assert isinstance(piece, bytes)
            held = piece
        await send({"type": "http.response.body", "body": held, "more_body": False})


def too_large(most: int) -> RefusedError:
    """The error of a file of more bytes."""
    return RefusedError(413, f"the file has more than {most} bytes", "file_too_large", param="file")


def _tenant(request: Request) -> str:
    name: str = request.scope[TENANT].name
    return name


def _check_form(headers: Mapping[str, str]) -> None:
    """Of other forms all is kept in memory. Raises RefusedError."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "multipart/form-data":
        reason = "a file has to come as multipart/form-data"
        raise RefusedError(415, reason, "unsupported_media_type")


def _bounded(receive: Receive, most: int) -> Receive:
    """What comes, up to so many bytes of a body. Raises RefusedError."""
    num_bytes = 0

    async def receive_bounded() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > most:
            raise too_large(most - _FORM_BYTES)
        return message

    return receive_bounded


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


def _printable(name: str) -> str:
    return "".join(c if c.isprintable() else "_" for c in name[:_MAX_NAME_CHARACTERS])
