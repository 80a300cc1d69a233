"""What one tenant may have when it makes a batch, and what goes so that there is room."""

import enum
from typing import NamedTuple

from sqlalchemy import Connection, and_, delete, exists, func, select

from batch_server.records import Batch
from batch_server.status import ENDED
from batch_server.store.files import RECORD_BYTES, num_bytes_of
from batch_server.store.tables import BATCHES, FILES


class TenantBounds(NamedTuple):
    """Of what one tenant may have when it makes a batch."""

    max_open: int
    """Batches that have not ended."""
    max_bytes: int
    """Of its files, and of the requests of its batches that have not ended."""
    max_record_bytes: int = 64 * 2**20
    """Of its batches themselves, those that have ended too: their metadata, what was wrong."""


class NotAdded(enum.Enum):
    """What its tenant has too many of."""

    OPEN = enum.auto()
    BYTES = enum.auto()
    RECORDS = enum.auto()


def make_room(
    connection: Connection, batch: Batch, num_metadata_bytes: int, bounds: TenantBounds
) -> NotAdded | None:
    """For a new batch. None: there is some, for which batches that have ended may be gone.

    Those whose results are deleted are, the oldest first, and no more than have to be.
    """
    if _num_open_of(connection, batch.tenant) >= bounds.max_open:
        return NotAdded.OPEN
    copied = _num_input_bytes(connection, batch.tenant) + _size_of(connection, batch.input_file_id)
    if num_bytes_of(connection, batch.tenant) + copied > bounds.max_bytes:
        return NotAdded.BYTES
    num_left = bounds.max_record_bytes - num_metadata_bytes - RECORD_BYTES
    is_room = _drop_oldest(connection, batch.tenant, num_left)
    return None if is_room else NotAdded.RECORDS


def _num_open_of(connection: Connection, tenant: str) -> int:
    found = select(func.count()).where(BATCHES.c.tenant == tenant, BATCHES.c.status.not_in(ENDED))
    return int(connection.execute(found).scalar_one())


def _num_input_bytes(connection: Connection, tenant: str) -> int:
    """Of the files of its batches that have not ended: their lines are kept beside them."""
    found = (
        select(func.coalesce(func.sum(FILES.c.num_bytes), 0))
        .select_from(BATCHES)
        .join(FILES, FILES.c.file_id == BATCHES.c.input_file_id)
        .where(BATCHES.c.tenant == tenant, BATCHES.c.status.not_in(ENDED))
    )
    return int(connection.execute(found).scalar_one())


def _size_of(connection: Connection, file_id: str) -> int:
    """In bytes; 0 where it is gone, which its batch will find."""
    found = select(FILES.c.num_bytes).where(FILES.c.file_id == file_id)
    return int(connection.execute(found).scalar_one_or_none() or 0)


def _drop_oldest(connection: Connection, tenant: str, max_bytes: int) -> bool:
    """Whether its batches have no more than that now. If not, none was dropped."""
    own = BATCHES.c.tenant == tenant
    metadata, errors = func.length(BATCHES.c.metadata), func.length(BATCHES.c.errors)  # of ASCII
    size = func.coalesce(metadata, 0) + func.coalesce(errors, 0) + RECORD_BYTES
    total = select(func.coalesce(func.sum(size), 0)).where(own)
    excess = int(connection.execute(total).scalar_one()) - max_bytes
    if excess <= 0:
        return True
    results = (BATCHES.c.output_file_id, BATCHES.c.error_file_id)
    has_results = exists().where(FILES.c.file_id.in_(results)).correlate(BATCHES)
    done = and_(own, BATCHES.c.status.in_(ENDED), ~has_results)
    found = select(BATCHES.c.batch_id, size).where(done)
    for batch_id, num_bytes in connection.execute(found.order_by(BATCHES.c.batch_id)):
        excess -= num_bytes
        if excess <= 0:
            connection.execute(delete(BATCHES).where(done, BATCHES.c.batch_id <= batch_id))
            return True
    return False
