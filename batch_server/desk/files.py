"""Files of clients: stored in bounds as they come, listed, read, deleted."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Final, NamedTuple

from batch_server.desk.checks import PageAsked, not_found
from batch_server.desk.chunks import in_chunks
from batch_server.desk.tenant_places import TenantPlaces
from batch_server.records import StoredFile, new_id
from batch_server.store.files import FileStore
from diptych.errors import (
    FileTooLargeError,
    InvalidRequestError,
    SlowClientError,
    StorageFullError,
)

PURPOSE: Final = "batch"
CHUNK_BYTES: Final = 2**18
_MOST_UPLOADS: Final = 16
_MOST_READS: Final = 16
_MOST_OF_TENANT: Final = 4  # of either
_MAX_NAME_CHARACTERS: Final = 256


class UploadBounds(NamedTuple):
    """Of the files that clients upload."""

    max_file_bytes: int
    max_tenant_bytes: int
    patience_s: float


class FileDesk:
    """Does what clients ask about files. Event loop only.

    An upload holds one chunk in memory; a download too, or one line of results if it has more.
    """

    def __init__(
        self,
        files: FileStore,
        bounds: UploadBounds,
        clock: Callable[[], float],
        undropped: Iterable[str] = (),
    ) -> None:
        """``clock``: seconds of the Unix epoch. ``undropped``: unfinished ones, from before."""
        self._files = files
        self._bounds = bounds
        self._clock = clock
        self._uploading = TenantPlaces(
            "many files are being uploaded", most_of_tenant=_MOST_OF_TENANT, most=_MOST_UPLOADS
        )
        self._undropped = set(undropped)  # of uploads that failed, as did that
        self._reading = TenantPlaces(
            "many files are being read", most_of_tenant=_MOST_OF_TENANT, most=_MOST_READS
        )

    @asynccontextmanager
    async def uploading(self, tenant: str) -> AsyncIterator[None]:
        """One of the tenant's places, for as long as a file may take to come.

        Raises QueueFullError, SlowClientError.
        """
        patience_s = self._bounds.patience_s
        with self._uploading.taken(tenant):
            try:
                async with asyncio.timeout(patience_s):
                    yield
            except TimeoutError:
                raise SlowClientError(f"the file did not come within {patience_s:g} s") from None

    async def store(
        self, tenant: str, filename: str, num_bytes: int, pieces: AsyncIterator[bytes]
    ) -> StoredFile:
        """A file that is there once this returns; where it raises nothing is left of it.

        Raises:
            FileTooLargeError, StorageFullError: before anything of ``pieces`` is taken.
            InvalidRequestError: they are not ``num_bytes``.
        """
        now_s = self._clock()
        file = StoredFile(
            file_id=new_id("file", now_s),
            tenant=tenant,
            purpose=PURPOSE,
            filename=_printable(filename or "file"),
            created_s=int(now_s),
            num_bytes=num_bytes,
        )
        if num_bytes > self._bounds.max_file_bytes:
            raise self.too_large()
        await self._drop_left()
        try:
            if not await self._files.begin(file, self._bounds.max_tenant_bytes):
                reason = f"all files would have more than {self._bounds.max_tenant_bytes} bytes"
                raise StorageFullError(f"{reason}: delete some", field="file")
            number = 0
            async for chunk in in_chunks(_exactly(num_bytes, pieces), CHUNK_BYTES):
                await self._files.add_chunk(file.file_id, number, chunk)
                number += 1
            await self._files.finish(file.file_id)
        except BaseException:  # the client left, or the time is over
            self._undropped.add(file.file_id)
            await self._drop_left()
            raise
        return file

    def too_large(self) -> FileTooLargeError:
        """The error of a file of more bytes than are taken."""
        most = self._bounds.max_file_bytes
        return FileTooLargeError(f"the file has more than {most} bytes", field="file")

    async def page(
        self, tenant: str, asked: PageAsked, purpose: str | None, *, ascending: bool
    ) -> Sequence[StoredFile]:
        """Those of a page, and one more where there is another page."""
        return await self._files.page(
            tenant, purpose, asked.after, asked.limit + 1, ascending=ascending
        )

    async def find(self, tenant: str, file_id: str) -> StoredFile:
        """What is known of one. Raises NotFoundError."""
        file = await self._files.find(tenant, file_id) if file_id.isprintable() else None
        if file is None:
            raise not_found("file", file_id)
        return file

    @contextmanager
    def reading(self, tenant: str) -> Iterator[None]:
        """One of the tenant's places, for ``content``. Raises QueueFullError."""
        with self._reading.taken(tenant):
            yield

    async def content(self, file: StoredFile) -> AsyncGenerator[bytes, None]:
        """All of one, in pieces of a chunk at most.

        Raises NotFoundError: it was deleted before all was read.
        """
        num_left = file.num_bytes
        async for piece in self._chunks(file) if file.batch_id is None else self._results(file):
            num_left -= len(piece)
            yield piece
        if num_left:
            raise not_found("file", file.file_id)

    async def delete(self, tenant: str, file_id: str) -> None:
        """It is gone once this returns. Raises NotFoundError."""
        if not (file_id.isprintable() and await self._files.delete(tenant, file_id)):
            raise not_found("file", file_id)

    async def wait_idle(self) -> None:
        """Until no file is being uploaded."""
        await self._uploading.wait_idle()

    async def _drop_left(self) -> None:
        """What uploads left that failed: it would take its tenant's room, and nobody sees it.

        Of a database that takes nothing now, once it does.
        """
        for file_id in tuple(self._undropped):
            await self._files.drop(file_id)
            self._undropped.discard(file_id)

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
                for start in range(0, len(line), CHUNK_BYTES):
                    yield line[start : start + CHUNK_BYTES]
            del lines, line  # before the next are fetched


async def _exactly(num_bytes: int, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same. Raises InvalidRequestError: they are more, or fewer."""
    num_left = num_bytes
    async for piece in pieces:
        num_left -= len(piece)
        if num_left < 0:
            break
        yield piece
    if num_left:
        than = "more" if num_left < 0 else "fewer"
        raise InvalidRequestError(f"has {than} bytes than the {num_bytes} it said", field="file")


def _printable(name: str) -> str:
    return "".join(c if c.isprintable() else "_" for c in name[:_MAX_NAME_CHARACTERS])
