"""Files in the database: what clients uploaded, in chunks, and what batches answered."""

import logging
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Final

from sqlalchemy import Connection, Row, and_, delete, func, insert, select, update
from sqlalchemy.exc import SQLAlchemyError

from batch_server.records import StoredFile
from batch_server.store.database import Database
from batch_server.store.tables import CHUNKS, FILES, RESULTS
from diptych.errors import DatabaseAwayError, DiskFullError

logger = logging.getLogger(__name__)

RECORD_BYTES: Final = 1024
"""Of a file or a batch, its name among them, beside what clients wrote and are told."""
_RESULTS_AT_ONCE: Final = 16
_RESULT_BYTES_AT_ONCE: Final = 2**18  # or one line, where that has more


class FileStore:
    """Files of all tenants; none is seen by another. See :class:`Database` for calls.

    A file is there for clients once it is whole. What an upload left unfinished is deleted
    with the next start.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    async def begin(self, file: StoredFile, max_tenant_bytes: int) -> bool:
        """Take room for a file whose chunks follow. False: its tenant has too little left."""
        return await self._database.call(_begin, file, max_tenant_bytes)

    async def add_chunk(self, file_id: str, number: int, data: bytes) -> None:
        """The next of its chunks, from 0."""
        await self._database.call(_add_chunk, file_id, number, data)

    async def finish(self, file_id: str) -> None:
        """It is whole."""
        await self._database.call(_finish, file_id)

    async def drop(self, file_id: str) -> None:
        """It will not be whole."""
        await self._database.call(_drop, file_id)

    async def drop_unfinished(self) -> Sequence[str]:
        """Delete what no upload will finish: those of a process that has ended.

        Those that are left, as the database takes nothing now: on a full disk, say.
        """
        try:
            await self._database.call(_drop_unfinished)
        except (SQLAlchemyError, DiskFullError, DatabaseAwayError) as error:
            logger.warning("unfinished uploads are still there", extra={"error": str(error)})
            return await self._database.call(_unfinished_ids)
        return ()

    async def find(self, tenant: str, file_id: str) -> StoredFile | None:
        """None: there is none, or it is another tenant's."""
        return await self._database.call(_find, tenant, file_id)

    async def page(
        self, tenant: str, purpose: str | None, after: str | None, limit: int, *, ascending: bool
    ) -> Sequence[StoredFile]:
        """Up to ``limit`` files behind ``after``, in the order in which they were made."""
        return await self._database.call(_page, tenant, purpose, after, limit, ascending)

    async def chunk(self, file_id: str, number: int) -> bytes | None:
        """One chunk of an upload; None: it has no more."""
        return await self._database.call(_chunk, file_id, number)

    async def results_after(self, file: StoredFile, number: int) -> Sequence[tuple[int, bytes]]:
        """The next lines of a file of results, with their numbers; empty: there are no more.

        They are a few, and one alone where it is large: a reader holds no more in memory.
        """
        return await self._database.call(_results_after, file, number)

    async def delete(self, tenant: str, file_id: str) -> bool:
        """Whether there was one. A batch whose lines were read does not need its file again."""
        return await self._database.call(_delete, tenant, file_id)


def _begin(connection: Connection, file: StoredFile, max_tenant_bytes: int) -> bool:
    if num_bytes_of(connection, file.tenant) + file.num_bytes > max_tenant_bytes:
        return False
    connection.execute(insert(FILES).values(values_of(file, is_whole=False)))
    return True


def values_of(file: StoredFile, *, is_whole: bool) -> dict[str, object]:
    """A file as a row, which has columns of its names."""
    return {**asdict(file), "is_whole": is_whole}


def _add_chunk(connection: Connection, file_id: str, number: int, data: bytes) -> None:
    connection.execute(insert(CHUNKS).values(file_id=file_id, number=number, data=data))


def _finish(connection: Connection, file_id: str) -> None:
    connection.execute(update(FILES).where(FILES.c.file_id == file_id).values(is_whole=True))


def _drop(connection: Connection, file_id: str) -> None:
    connection.execute(delete(CHUNKS).where(CHUNKS.c.file_id == file_id))
    connection.execute(delete(FILES).where(FILES.c.file_id == file_id))


def _unfinished_ids(connection: Connection) -> Sequence[str]:
    found = select(FILES.c.file_id).where(FILES.c.is_whole.is_(False))
    return list(connection.execute(found).scalars())


def _drop_unfinished(connection: Connection) -> None:
    unfinished = select(FILES.c.file_id).where(FILES.c.is_whole.is_(False))
    connection.execute(delete(CHUNKS).where(CHUNKS.c.file_id.in_(unfinished)))
    connection.execute(delete(FILES).where(FILES.c.is_whole.is_(False)))


def _find(connection: Connection, tenant: str, file_id: str) -> StoredFile | None:
    row = connection.execute(
        select(FILES).where(
            FILES.c.file_id == file_id, FILES.c.tenant == tenant, FILES.c.is_whole.is_(True)
        )
    ).one_or_none()
    return None if row is None else _file_of(row)


def _page(
    connection: Connection,
    tenant: str,
    purpose: str | None,
    after: str | None,
    limit: int,
    ascending: bool,
) -> Sequence[StoredFile]:
    found = select(FILES).where(FILES.c.tenant == tenant, FILES.c.is_whole.is_(True))
    if purpose is not None:
        found = found.where(FILES.c.purpose == purpose)
    if after is not None:
        found = found.where(FILES.c.file_id > after if ascending else FILES.c.file_id < after)
    order = FILES.c.file_id.asc() if ascending else FILES.c.file_id.desc()
    return [_file_of(row) for row in connection.execute(found.order_by(order).limit(limit))]


def num_bytes_of(connection: Connection, tenant: str) -> int:
    """Of all files of a tenant, those that are not whole yet too; each takes a little more."""
    own = FILES.c.tenant == tenant
    total = select(func.coalesce(func.sum(FILES.c.num_bytes + RECORD_BYTES), 0)).where(own)
    return int(connection.execute(total).scalar_one())


def _chunk(connection: Connection, file_id: str, number: int) -> bytes | None:
    found = select(CHUNKS.c.data).where(CHUNKS.c.file_id == file_id, CHUNKS.c.number == number)
    return connection.execute(found).scalar_one_or_none()


def _results_after(
    connection: Connection, file: StoredFile, number: int
) -> Sequence[tuple[int, bytes]]:
    left = and_(
        RESULTS.c.batch_id == file.batch_id,
        RESULTS.c.is_error.is_(file.is_errors),
        RESULTS.c.number > number,
    )
    sizes = select(RESULTS.c.number, RESULTS.c.num_bytes).where(left).order_by(RESULTS.c.number)
    rows = connection.execute(sizes.limit(_RESULTS_AT_ONCE))
    last = _last_at_once([(row.number, row.num_bytes) for row in rows])
    if last is None:
        return []
    found = select(RESULTS.c.number, RESULTS.c.line).where(left, RESULTS.c.number <= last)
    return [(row.number, row.line) for row in connection.execute(found.order_by(RESULTS.c.number))]


def _last_at_once(sizes: Sequence[tuple[int, int]]) -> int | None:
    """Up to which number lines are fetched; None: there are none."""
    last, num_bytes = None, 0
    for number, size in sizes:
        num_bytes += size
        if last is not None and num_bytes > _RESULT_BYTES_AT_ONCE:
            break
        last = number
    return last


def _delete(connection: Connection, tenant: str, file_id: str) -> bool:
    file = _find(connection, tenant, file_id)
    if file is None:
        return False
    _drop(connection, file_id)
    if file.batch_id is not None:
        own = and_(RESULTS.c.batch_id == file.batch_id, RESULTS.c.is_error.is_(file.is_errors))
        connection.execute(delete(RESULTS).where(own))
    return True


def _file_of(row: Row[tuple[object, ...]]) -> StoredFile:
    return StoredFile(**{each.name: getattr(row, each.name) for each in fields(StoredFile)})
