"""Batches in the database: their state, their lines, and of each line one result at most."""

import json
from collections.abc import Sequence
from typing import Final

from sqlalchemy import (
    Connection,
    Row,
    and_,
    delete,
    func,
    insert,
    select,
    update,
)

from batch_server.records import Batch, Line, LineError, LineResult, StoredFile, new_id
from batch_server.status import BATCH_TRANSITIONS, ENDED, BatchEvent, BatchStatus
from batch_server.store.database import Database
from batch_server.store.files import values_of
from batch_server.store.tables import BATCHES, FILES, LINES, RESULTS
from batch_server.store.tenant_room import NotAdded, TenantBounds, make_room

_OUTPUT_PURPOSE: Final = "batch_output"
_MOVED_IN: Final = tuple(each for each in BatchStatus if each is not BatchStatus.VALIDATING)


class BatchStore:
    """Batches of all tenants; none is seen by another. See :class:`Database` for calls.

    Invariants: a batch moves as BATCH_TRANSITIONS says; its counts are those of its results;
    of a line there is one result, the first. Those that have ended may go for new ones of their
    tenant, see :func:`make_room`.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, batch: Batch, bounds: TenantBounds) -> NotAdded | None:
        """A new one. None: it is stored."""
        return await self._database.call(_add, batch, bounds)

    async def find(self, tenant: str, batch_id: str) -> Batch | None:
        """None: there is none, or it is another tenant's."""
        batch = await self.get(batch_id)
        return None if batch is None or batch.tenant != tenant else batch

    async def get(self, batch_id: str) -> Batch | None:
        """Whoever's it is."""
        return await self._database.call(_get, batch_id)

    async def page(self, tenant: str, after: str | None, limit: int) -> Sequence[Batch]:
        """Up to ``limit``, the newest first, behind ``after``."""
        return await self._database.call(_page, tenant, after, limit)

    async def open_ids(self) -> Sequence[str]:
        """Those that have not ended, the oldest first."""
        return await self._database.call(_open_ids)

    async def move(self, batch_id: str, event: BatchEvent, now_s: float) -> BatchStatus | None:
        """The state after ``event``; None: it changes nothing. Raises IllegalTransitionError."""
        return await self._database.call(_move, batch_id, event, now_s)

    async def cancel(self, tenant: str, batch_id: str, now_s: float) -> Batch | None:
        """The batch afterwards, which has been moved if it could; None as with ``find``."""
        return await self._database.call(_cancel, tenant, batch_id, now_s)

    async def refuse(self, batch_id: str, errors: Sequence[LineError], now_s: float) -> None:
        """Its file is wrong: it ends, and keeps none of its lines."""
        await self._database.call(_refuse, batch_id, errors, now_s)

    async def clear_lines(self, batch_id: str) -> None:
        """Forget lines that were stored before its file was accepted."""
        await self._database.call(_clear_lines, batch_id)

    async def add_lines(self, batch_id: str, lines: Sequence[Line]) -> None:
        """Lines of a file that is not accepted yet."""
        await self._database.call(_add_lines, batch_id, lines)

    async def accept(self, batch_id: str, num_lines: int, now_s: float) -> None:
        """All its lines are stored."""
        await self._database.call(_accept, batch_id, num_lines, now_s)

    async def unanswered(self, batch_id: str, rank: int, limit: int) -> Sequence[Line]:
        """Lines without a result from ``rank`` on, in the order in which they are sent."""
        return await self._database.call(_unanswered, batch_id, rank, limit)

    async def body(self, batch_id: str, number: int) -> bytes:
        """What is sent of one line of a batch that has not ended."""
        return await self._database.call(_body, batch_id, number)

    async def add_results(
        self, batch_id: str, results: Sequence[LineResult], *, are_unsent: bool = False
    ) -> None:
        """Results of lines; those that have one keep it."""
        await self._database.call(_add_results, batch_id, results, are_unsent)

    async def finish(self, batch_id: str, event: BatchEvent, now_s: float) -> None:
        """It ends, its results become files, and its lines are forgotten."""
        await self._database.call(_finish, batch_id, event, now_s)


def _add(connection: Connection, batch: Batch, bounds: TenantBounds) -> NotAdded | None:
    metadata = None if batch.metadata is None else json.dumps(dict(batch.metadata))
    refusal = make_room(connection, batch, len(metadata or ""), bounds)
    if refusal is not None:
        return refusal
    connection.execute(
        insert(BATCHES).values(
            batch_id=batch.batch_id,
            tenant=batch.tenant,
            endpoint=batch.endpoint,
            input_file_id=batch.input_file_id,
            completion_window=batch.completion_window,
            status=batch.status,
            created_s=batch.created_s,
            expires_s=batch.expires_s,
            metadata=metadata,
            num_lines=0,
            num_completed=0,
            num_failed=0,
            num_unsent=0,
        )
    )
    return None


def _get(connection: Connection, batch_id: str) -> Batch | None:
    row = connection.execute(select(BATCHES).where(BATCHES.c.batch_id == batch_id)).one_or_none()
    return None if row is None else _batch_of(row)


def _page(connection: Connection, tenant: str, after: str | None, limit: int) -> Sequence[Batch]:
    found = select(BATCHES).where(BATCHES.c.tenant == tenant)
    if after is not None:
        found = found.where(BATCHES.c.batch_id < after)
    found = found.order_by(BATCHES.c.batch_id.desc()).limit(limit)
    return [_batch_of(row) for row in connection.execute(found)]


def _open_ids(connection: Connection) -> Sequence[str]:
    found = select(BATCHES.c.batch_id).where(BATCHES.c.status.not_in(ENDED))
    return list(connection.execute(found.order_by(BATCHES.c.batch_id)).scalars())


def _move(
    connection: Connection, batch_id: str, event: BatchEvent, now_s: float
) -> BatchStatus | None:
    own = BATCHES.c.batch_id == batch_id
    status = BatchStatus(connection.execute(select(BATCHES.c.status).where(own)).scalar_one())
    after = BATCH_TRANSITIONS.after(status, event)
    if after is not None:
        moved = {"status": after, f"{after}_s": int(now_s)}
        connection.execute(update(BATCHES).where(own).values(moved))
    return after


def _cancel(connection: Connection, tenant: str, batch_id: str, now_s: float) -> Batch | None:
    batch = _get(connection, batch_id)
    if batch is None or batch.tenant != tenant:
        return None
    if BATCH_TRANSITIONS.allows(batch.status, BatchEvent.CANCEL):
        _move(connection, batch_id, BatchEvent.CANCEL, now_s)
    return _get(connection, batch_id)


def _refuse(
    connection: Connection, batch_id: str, errors: Sequence[LineError], now_s: float
) -> None:
    if _move(connection, batch_id, BatchEvent.REFUSE, now_s) is None:
        return
    _clear_lines(connection, batch_id)
    told = json.dumps([list(error) for error in errors])
    connection.execute(update(BATCHES).where(BATCHES.c.batch_id == batch_id).values(errors=told))


def _clear_lines(connection: Connection, batch_id: str) -> None:
    connection.execute(delete(LINES).where(LINES.c.batch_id == batch_id))


def _add_lines(connection: Connection, batch_id: str, lines: Sequence[Line]) -> None:
    connection.execute(insert(LINES), [{"batch_id": batch_id, **line._asdict()} for line in lines])


def _accept(connection: Connection, batch_id: str, num_lines: int, now_s: float) -> None:
    _move(connection, batch_id, BatchEvent.ACCEPT, now_s)
    own = BATCHES.c.batch_id == batch_id
    connection.execute(update(BATCHES).where(own).values(num_lines=num_lines))


def _unanswered(connection: Connection, batch_id: str, rank: int, limit: int) -> Sequence[Line]:
    same = and_(RESULTS.c.batch_id == LINES.c.batch_id, RESULTS.c.number == LINES.c.number)
    found = (
        select(LINES.c.number, LINES.c.rank, LINES.c.custom_id, LINES.c.request_id)
        .outerjoin(RESULTS, same)
        .where(LINES.c.batch_id == batch_id, LINES.c.rank >= rank, RESULTS.c.number.is_(None))
        .order_by(LINES.c.rank)
        .limit(limit)
    )
    return [
        Line(row.number, row.rank, row.custom_id, row.request_id)
        for row in connection.execute(found)
    ]


def _body(connection: Connection, batch_id: str, number: int) -> bytes:
    found = select(LINES.c.body).where(LINES.c.batch_id == batch_id, LINES.c.number == number)
    body: bytes = connection.execute(found).scalar_one()
    return body


def _add_results(
    connection: Connection, batch_id: str, results: Sequence[LineResult], are_unsent: bool
) -> None:
    numbers = [result.number for result in results]
    there = select(RESULTS.c.number).where(
        RESULTS.c.batch_id == batch_id, RESULTS.c.number.in_(numbers)
    )
    known = set(connection.execute(there).scalars())
    new = [result for result in results if result.number not in known]
    if not new:
        return
    rows = [
        {"batch_id": batch_id, "num_bytes": len(result.line), **result._asdict()} for result in new
    ]
    connection.execute(insert(RESULTS), rows)
    num_failed = sum(result.is_error for result in new)
    counts = {
        "num_completed": BATCHES.c.num_completed + (len(new) - num_failed),
        "num_failed": BATCHES.c.num_failed + num_failed,
        "num_unsent": BATCHES.c.num_unsent + (len(new) if are_unsent else 0),
    }
    connection.execute(update(BATCHES).where(BATCHES.c.batch_id == batch_id).values(counts))


def _finish(connection: Connection, batch_id: str, event: BatchEvent, now_s: float) -> None:
    batch = _get(connection, batch_id)
    assert batch is not None
    files = {
        "output_file_id": _make_file(connection, batch, now_s, is_errors=False),
        "error_file_id": _make_file(connection, batch, now_s, is_errors=True),
    }
    connection.execute(update(BATCHES).where(BATCHES.c.batch_id == batch_id).values(files))
    _move(connection, batch_id, event, now_s)
    _clear_lines(connection, batch_id)


def _make_file(
    connection: Connection, batch: Batch, now_s: float, *, is_errors: bool
) -> str | None:
    """Its id; None: there is nothing for it."""
    own = and_(RESULTS.c.batch_id == batch.batch_id, RESULTS.c.is_error.is_(is_errors))
    total = connection.execute(select(func.sum(RESULTS.c.num_bytes)).where(own)).scalar_one()
    if total is None:
        return None
    file = StoredFile(
        file_id=new_id("file", now_s),
        tenant=batch.tenant,
        purpose=_OUTPUT_PURPOSE,
        filename=f"{batch.batch_id}_{'error' if is_errors else 'output'}.jsonl",
        created_s=int(now_s),
        num_bytes=int(total),
        batch_id=batch.batch_id,
        is_errors=is_errors,
    )
    connection.execute(insert(FILES).values(values_of(file, is_whole=True)))
    return file.file_id


def _batch_of(row: Row[tuple[object, ...]]) -> Batch:
    moved = {status: getattr(row, f"{status}_s") for status in _MOVED_IN}
    return Batch(
        batch_id=row.batch_id,
        tenant=row.tenant,
        endpoint=row.endpoint,
        input_file_id=row.input_file_id,
        completion_window=row.completion_window,
        status=BatchStatus(row.status),
        created_s=row.created_s,
        expires_s=row.expires_s,
        moved_s={status: when for status, when in moved.items() if when is not None},
        output_file_id=row.output_file_id,
        error_file_id=row.error_file_id,
        metadata=None if row.metadata is None else json.loads(row.metadata),
        errors=[LineError(*error) for error in json.loads(row.errors or "[]")],
        num_lines=row.num_lines,
        num_completed=row.num_completed,
        num_failed=row.num_failed,
        num_unsent=row.num_unsent,
    )
