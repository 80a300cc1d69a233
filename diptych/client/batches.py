"""Files of requests that a batch server has answered."""

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, NamedTuple, Self, TypeAlias, TypeVar

import grpc
from google.protobuf.message import Message

from diptych.address import PORT_EXPECTED, has_own_port
from diptych.client.credentials import lock_of, metadata_of
from diptych.client.request import sayable
from diptych.client.retries import Retries, WatchRetries
from diptych.errors import (
    ConfigurationError,
    DiptychError,
    DiskFullError,
    InvalidRequestError,
    QueueFullError,
    StorageFullError,
)
from diptych.rpc.call_end import CallEnd
from diptych.rpc.channel import open_channel
from diptych.rpc.status import from_rpc_error, remote_error
from diptych.v1 import batches_pb2, batches_pb2_grpc

ENDED: Final = frozenset({"failed", "completed", "expired", "cancelled"})
DEFAULT_WINDOW: Final = "24h"
RETRIES: Final = 5
_TIMEOUT_S: Final = 60.0
_PIECE_BYTES: Final = 2**18
_STATUS_NAMES: Final = {
    number: name.removeprefix("BATCH_STATUS_").lower()
    for name, number in batches_pb2.BatchStatus.items()
}
_REFUSALS: Final = (InvalidRequestError, QueueFullError, StorageFullError, DiskFullError)
NO_METADATA: Final[Mapping[str, str]] = {}

_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response", bound=Message)
_Method: TypeAlias = "grpc.aio.UnaryUnaryMultiCallable[_Request, _Response]"


class BatchState(NamedTuple):
    """How far a batch is, as its server tells."""

    batch_id: str
    status: str
    """``in_progress``, say; ENDED has those that it ends with. ``unknown``: one of a newer
    server that has no name here."""
    num_lines: int
    num_completed: int
    num_failed: int
    output_file_id: str | None
    error_file_id: str | None
    errors: tuple[str, ...]
    """What is wrong with its file, for people."""

    @property
    def done_ratio(self) -> float:
        """Of its lines; 0 as long as nobody knows how many there are."""
        return (self.num_completed + self.num_failed) / self.num_lines if self.num_lines else 0.0


class BatchClient:
    """Calls one batch server. Used from one event loop; an async context manager.

    Questions that broke off are asked again. An upload and the making of a batch are not: they
    may have been done.
    """

    def __init__(
        self,
        address: str,
        *,
        api_key: str = "",
        tls: bool | Path = False,
        server_name: str = "",
        retries: int = RETRIES,
    ) -> None:
        """``address`` is host:port; the others as DiptychClient's. Connects when first used.

        Raises ConfigurationError.
        """
        if not has_own_port(address):
            raise ConfigurationError(PORT_EXPECTED)
        self._metadata = metadata_of(api_key)
        self._channel = open_channel(address, lock=lock_of(tls, server_name), by_proxy=True)
        self._server: batches_pb2_grpc.BatchesAsyncStub = batches_pb2_grpc.BatchesStub(
            self._channel
        )
        self._retries = retries

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; calls under way are cancelled."""
        await self._channel.close(None)

    async def submit(
        self,
        path: Path,
        endpoint: str,
        completion_window: str = DEFAULT_WINDOW,
        metadata: Mapping[str, str] = NO_METADATA,
    ) -> BatchState:
        """Upload a file and make a batch of it. Raises OSError, DiptychError.

        The upload of a batch that is refused is deleted again.
        """
        file_id = await self.upload(path)
        try:
            return await self.create(file_id, endpoint, completion_window, metadata)
        except _REFUSALS:
            with suppress(DiptychError):
                await self.delete(file_id)
            raise

    async def upload(self, path: Path) -> str:
        """The id of a file, JSON Lines, that is stored now. Raises OSError, DiptychError."""
        with path.open("rb") as file:
            parts = _Parts(name_of(path), file)
            call = self._server.UploadFile(parts.sent(), metadata=self._metadata)
            end = CallEnd(call)
            try:
                stored = await call
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(await end.error(error) or error) from None
            except asyncio.CancelledError:
                if parts.failure is None or _is_cancelled():
                    raise
                raise parts.failure from None
        return stored.file.id

    async def create(
        self,
        file_id: str,
        endpoint: str,
        completion_window: str = DEFAULT_WINDOW,
        metadata: Mapping[str, str] = NO_METADATA,
    ) -> BatchState:
        """Have an uploaded file answered. Raises DiptychError."""
        with sayable():
            request = batches_pb2.CreateBatchRequest(
                input_file_id=file_id,
                endpoint=endpoint,
                completion_window=completion_window,
                metadata=metadata,
            )
        with _told():
            made = await self._server.CreateBatch(
                request, timeout=_TIMEOUT_S, metadata=self._metadata
            )
        return _state_of(made.batch)

    async def state(self, batch_id: str) -> BatchState:
        """How far it is. Raises DiptychError."""
        with sayable():
            request = batches_pb2.GetBatchRequest(id=batch_id)
        found = await self._ask(self._server.GetBatch, request)
        return _state_of(found.batch)

    async def watch(self, batch_id: str) -> AsyncGenerator[BatchState, None]:
        """How far it is, now and when that has changed, until it has ended. Raises DiptychError.

        A watch that breaks off is asked for again: for an hour at most while nothing changes.
        """
        with sayable():
            request = batches_pb2.WatchBatchRequest(id=batch_id)
        retries, told = WatchRetries(self._retries), None
        while True:
            call = self._server.WatchBatch(request, metadata=self._metadata)
            try:
                async for response in call:
                    state = _state_of(response.batch)
                    retries.came(is_new=state != told)
                    if state != told:
                        told = state
                        yield state
            except grpc.RpcError as error:
                failure = from_rpc_error(error)
            else:
                return
            finally:
                call.cancel()
            pause_s = retries.pause_s(failure)
            if pause_s is None:
                raise _lost(batch_id, failure, retries) from None
            await asyncio.sleep(pause_s)

    async def batches(self, limit: int = 20, after: str = "") -> list[BatchState]:
        """Up to ``limit``, the newest first, behind the one of that id. Raises DiptychError."""
        with sayable():
            request = batches_pb2.ListBatchesRequest(limit=limit, after=after)
        found = await self._ask(self._server.ListBatches, request)
        return [_state_of(batch) for batch in found.batches]

    async def cancel(self, batch_id: str) -> BatchState:
        """Send no more of it. Raises DiptychError."""
        with sayable():
            request = batches_pb2.CancelBatchRequest(id=batch_id)
        cancelled = await self._ask(self._server.CancelBatch, request)
        return _state_of(cancelled.batch)

    async def content(self, file_id: str) -> AsyncGenerator[bytes, None]:
        """What is in a file, piece by piece. Raises DiptychError."""
        with sayable():
            request = batches_pb2.ReadFileRequest(id=file_id)
        call = self._server.ReadFile(request, metadata=self._metadata)
        try:
            async for response in call:
                yield response.data
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        finally:
            call.cancel()

    async def delete(self, file_id: str) -> None:
        """Make room. Raises DiptychError."""
        with sayable():
            request = batches_pb2.DeleteFileRequest(id=file_id)
        with _told():
            await self._server.DeleteFile(request, timeout=_TIMEOUT_S, metadata=self._metadata)

    async def _ask(self, method: "_Method[_Request, _Response]", request: _Request) -> _Response:
        retries = Retries(self._retries, None)
        while True:
            try:
                return await method(request, timeout=_TIMEOUT_S, metadata=self._metadata)
            except grpc.RpcError as error:
                await _pause(error, retries)


async def _pause(error: grpc.RpcError, retries: Retries) -> None:
    """Wait for the next try. Raises DiptychError: there is none."""
    failure = from_rpc_error(error)
    pause_s = retries.pause_s(failure)
    if pause_s is None:
        raise failure from None
    await asyncio.sleep(pause_s)


def _lost(batch_id: str, failure: DiptychError, retries: WatchRetries) -> DiptychError:
    """What ends a watch: that it could not go on, or nothing changed while it broke off."""
    if not retries.is_still_for_good:
        return failure
    reason = (
        f"{batch_id}: its watch broke off {retries.num_still} times in {retries.still_s:.0f} s, "
        f"in which the batch did not change, the last time with: {failure.message}"
    )
    return remote_error(failure.code, failure.reason, reason)


@contextmanager
def _told() -> Iterator[None]:
    """What a call ends with as a DiptychError."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error) from None


def name_of(path: Path) -> str:
    """What a file is called: of a name that is not all UTF-8, ``?`` for what is no character."""
    return path.name.encode(errors="replace").decode()


class _Parts:
    """The messages of one upload. gRPC cancels the call where reading fails, and keeps why."""

    def __init__(self, name: str, file: BinaryIO) -> None:
        self.failure: OSError | None = None
        self._name, self._file = name, file

    async def sent(self) -> AsyncIterator[batches_pb2.UploadFileRequest]:
        """Raises OSError, which is ``failure`` then."""
        num_bytes = os.fstat(self._file.fileno()).st_size
        head = batches_pb2.NewFile(filename=self._name, num_bytes=num_bytes)
        yield batches_pb2.UploadFileRequest(file=head)
        try:
            while data := await asyncio.to_thread(self._file.read, _PIECE_BYTES):
                yield batches_pb2.UploadFileRequest(data=data)
        except OSError as error:
            self.failure = error
            raise


def _is_cancelled() -> bool:
    """Whether the calling task was asked to end."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _state_of(batch: batches_pb2.Batch) -> BatchState:
    return BatchState(
        batch_id=batch.id,
        status=_STATUS_NAMES.get(batch.status, "unknown"),
        num_lines=batch.num_lines,
        num_completed=batch.num_completed,
        num_failed=batch.num_failed,
        output_file_id=batch.output_file_id or None,
        error_file_id=batch.error_file_id or None,
        errors=tuple(error.message for error in batch.errors),
    )
