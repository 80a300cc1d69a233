"""The public Batches service: a thin translation between gRPC and what clients may do."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Final, TypeVar

import grpc
from google.protobuf.message import Message

from batch_server.desk.batches import DEFAULT_LISTED, BatchDesk
from batch_server.desk.chunks import in_chunks
from batch_server.desk.files import CHUNK_BYTES, FileDesk
from batch_server.rpc.messages import batch_message, file_message, read_asked
from diptych.errors import InvalidRequestError, SlowClientError
from diptych.rpc.server import Context, check_decoded
from diptych.v1 import batches_pb2 as public
from diptych.v1 import batches_pb2_grpc
from router.frontend.callers.callers import Callers, authorization

SERVICE: Final = public.DESCRIPTOR.services_by_name["Batches"].full_name
MAX_MESSAGE_BYTES: Final = 2**20
"""Of what a client sends at a time, which may have half of it as data."""
_MAX_DATA_BYTES: Final = MAX_MESSAGE_BYTES // 2

M = TypeVar("M", bound=Message)


class BatchesServicer(batches_pb2_grpc.BatchesServicer):
    """Batches: one handler task per call. See batches.proto."""

    def __init__(
        self, files: FileDesk, batches: BatchDesk, callers: Callers, *, write_s: float
    ) -> None:
        """Who takes no piece of a stream for ``write_s`` is given up."""
        self._files = files
        self._batches = batches
        self._callers = callers
        self._write_s = write_s

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve the methods."""
        batches_pb2_grpc.add_BatchesServicer_to_server(self, server)

    async def UploadFile(
        self, requests: AsyncIterator[public.UploadFileRequest], context: Context
    ) -> public.UploadFileResponse:
        """See batches.proto; so the next ones."""
        tenant = await self._tenant(context)
        async with self._files.uploading(tenant):
            file = await _read_file(requests)
            stored = await self._files.store(
                tenant, file.filename, file.num_bytes, _read_data(requests)
            )
        return public.UploadFileResponse(file=file_message(stored))

    async def ReadFile(
        self, request: public.ReadFileRequest, context: Context
    ) -> AsyncIterator[public.ReadFileResponse]:
        tenant = await self._tenant(context)
        file = await self._files.find(tenant, request.id)
        with self._files.reading(tenant):
            async with aclosing(in_chunks(self._files.content(file), CHUNK_BYTES)) as chunks:
                async for chunk in chunks:
                    await self._write(context, public.ReadFileResponse(data=chunk))
        return
        yield  # a generator without items: the stream is written with context.write

    async def DeleteFile(
        self, request: public.DeleteFileRequest, context: Context
    ) -> public.DeleteFileResponse:
        await self._files.delete(await self._tenant(context), request.id)
        return public.DeleteFileResponse()

    async def CreateBatch(
        self, request: public.CreateBatchRequest, context: Context
    ) -> public.CreateBatchResponse:
        batch = await self._batches.create(await self._tenant(context), read_asked(request))
        return public.CreateBatchResponse(batch=batch_message(batch))

    async def GetBatch(
        self, request: public.GetBatchRequest, context: Context
    ) -> public.GetBatchResponse:
        batch = await self._batches.find(await self._tenant(context), request.id)
        return public.GetBatchResponse(batch=batch_message(batch))

    async def ListBatches(
        self, request: public.ListBatchesRequest, context: Context
    ) -> public.ListBatchesResponse:
        tenant = await self._tenant(context)
        asked = self._batches.asked_page(request.limit or DEFAULT_LISTED, request.after or None)
        found = await self._batches.page(tenant, asked)
        return public.ListBatchesResponse(
            batches=[batch_message(batch) for batch in found[: asked.limit]],
            has_more=len(found) > asked.limit,
        )

    async def CancelBatch(
        self, request: public.CancelBatchRequest, context: Context
    ) -> public.CancelBatchResponse:
        batch = await self._batches.cancel(await self._tenant(context), request.id)
        return public.CancelBatchResponse(batch=batch_message(batch))

    async def WatchBatch(
        self, request: public.WatchBatchRequest, context: Context
    ) -> AsyncIterator[public.WatchBatchResponse]:
        tenant = await self._tenant(context)
        with self._batches.watching(tenant):
            async with aclosing(self._batches.changes(tenant, request.id)) as changes:
                async for batch in changes:
                    await self._write(
                        context, public.WatchBatchResponse(batch=batch_message(batch))
                    )
        return
        yield

    async def _tenant(self, context: Context) -> str:
        """Whose call it is. Raises InvalidApiKeyError."""
        given = authorization(tuple(context.invocation_metadata() or ()))
        return (await self._callers.tenant(given)).name

    async def _write(self, context: Context, message: Message) -> None:
        """Raises SlowClientError; CancelledError where the client is gone."""
        try:
            async with asyncio.timeout(self._write_s):
                await context.write(message)
        except TimeoutError:
            raise SlowClientError(
                f"the client did not take a response for {self._write_s:g} s"
            ) from None
        except grpc.aio.BaseError:  # the call is over
            raise asyncio.CancelledError from None


async def _read_file(requests: AsyncIterator[public.UploadFileRequest]) -> public.NewFile:
    """The first message of an upload. Raises InvalidRequestError."""
    first = await anext(aiter(requests), None)
    check_decoded(first)
    if first is None or first.WhichOneof("part") != "file":
        raise InvalidRequestError("should come first", field="file")
    return first.file


async def _read_data(requests: AsyncIterator[public.UploadFileRequest]) -> AsyncIterator[bytes]:
    """The others. Raises InvalidRequestError."""
    async for request in requests:
        check_decoded(request)
        if request.WhichOneof("part") != "data":
            raise InvalidRequestError("should follow the file", field="data")
        if len(request.data) > _MAX_DATA_BYTES:
            raise InvalidRequestError(
                f"has {len(request.data)} bytes, more than {_MAX_DATA_BYTES}", field="data"
            )
        yield request.data
