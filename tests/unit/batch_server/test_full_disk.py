"""A server whose disk is full says so in a line, and keeps nothing of what it could not store."""

import errno
import json
import logging
import resource
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from sqlalchemy import Connection, func, select
from sqlalchemy.exc import DBAPIError

from batch_server.desk.files import FileDesk, UploadBounds
from batch_server.store.database import Database
from batch_server.store.tables import BATCHES, CHUNKS, FILES
from diptych.errors import DiskFullError
from diptych.telemetry.logs import JSONFormatter
from tests.unit.batch_server.http_rig import BODY, asked, upload
from tests.unit.batch_server.rig import NOW_S, Rig, opened

BOUNDS = UploadBounds(max_file_bytes=8_000_000, max_tenant_bytes=10_000_000, patience_s=30.0)
DATABASE = "the disk of the server's database is full: its operator has to make room"
TEMPORARY = (
    "the disk of the server's temporary files is full: its operator has to make room, "
    "or to set TMPDIR"
)


async def set_pages(database: Database, num_more: int) -> None:
    """Room for so many more pages of 4 KiB; SQLite says of that what it says of a full disk."""

    def limit(connection: Connection) -> None:
        num_pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        connection.exec_driver_sql(f"PRAGMA max_page_count={num_pages + num_more}")

    await database.call(limit)


async def num_kept(rig: Rig) -> int:
    """Rows of files, of what is in them, and of batches."""

    def count(connection: Connection) -> int:
        tables = (FILES, CHUNKS, BATCHES)
        counts = (select(func.count()).select_from(each) for each in tables)
        return sum(int(connection.execute(each).scalar_one()) for each in counts)

    return await rig.files._database.call(count)


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """No file of this process may have more."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))


async def test_a_full_database(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with opened(tmp_path) as rig, asked(rig, bounds=BOUNDS) as client:
        database = rig.files._database
        await set_pages(database, 100)
        files = {"file": ("in.jsonl", b"x" * 2_000_000)}
        answer = await client.post("/v1/files", files=files, data={"purpose": "batch"})
        assert (answer.status_code, answer.json()["error"]) == (
            507,
            {"message": DATABASE, "type": "server_error", "param": None, "code": "disk_full"},
        )
        assert await num_kept(rig) == 0
        await set_pages(database, 10_000)
        await upload(client, b"x" * 2_000_000)
    assert not any(record.exc_info for record in caplog.records), "no traceback"


async def test_what_the_database_logs_of_a_request_has_its_id(tmp_path: Path) -> None:
    lines: list[dict[str, str]] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(json.loads(JSONFormatter("batch-server").format(record)))

    kept = Kept(logging.ERROR)
    logging.getLogger("batch_server").addHandler(kept)
    try:
        async with opened(tmp_path) as rig, asked(rig, bounds=BOUNDS) as client:
            await set_pages(rig.files._database, 0)
            form = {"files": {"file": ("in.jsonl", b"x" * 90_000)}, "data": {"purpose": "batch"}}
            await client.post("/v1/files", headers={"x-request-id": "mine"}, **form)  # type: ignore[arg-type]
    finally:
        logging.getLogger("batch_server").removeHandler(kept)
    assert [(each["message"], each["request_id"]) for each in lines] == [
        ("the disk of the database is full", "mine")
    ]


async def test_a_database_whose_quota_is_used_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its file may not grow, which SQLite calls an error of writing."""
    async with opened(tmp_path) as rig, asked(rig, bounds=BOUNDS) as client:
        files = {"file": ("in.jsonl", b"x" * 2_000_000)}
        with largest_file(600_000):
            answer = await client.post("/v1/files", files=files, data={"purpose": "batch"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (507, "disk_full")
    assert not any(record.exc_info for record in caplog.records), "no traceback"


async def test_a_batch_that_there_is_no_room_for(tmp_path: Path) -> None:
    async with opened(tmp_path) as rig, asked(rig, bounds=BOUNDS) as client:
        file_id = await upload(client)
        num_before = await num_kept(rig)
        await set_pages(rig.files._database, 0)
        large = {**BODY, "metadata": {str(n): "x" * 512 for n in range(16)}}
        answer = await client.post("/v1/batches", json={**large, "input_file_id": file_id})
        assert (answer.status_code, answer.json()["error"]["message"]) == (507, DATABASE)
        assert await num_kept(rig) == num_before


async def test_full_temporary_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with opened(tmp_path) as rig, asked(rig, bounds=BOUNDS) as client:
        num_open = psutil.Process().num_fds()
        files = {"file": ("in.jsonl", b"x" * 6_000_000)}
        with largest_file(3_000_000):
            answer = await client.post("/v1/files", files=files, data={"purpose": "batch"})
        assert (answer.status_code, answer.json()["error"]["message"]) == (507, TEMPORARY)
        assert answer.json()["error"]["code"] == "disk_full"
        assert psutil.Process().num_fds() == num_open, "a file is still there"
        assert await num_kept(rig) == 0
        await upload(client, b"x" * 6_000_000)
    assert not any(record.exc_info for record in caplog.records), "no traceback"


async def test_temporary_files_that_were_full_before_the_server_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Then Python finds no folder for them at all, which it looks for with the first."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    async with opened(tmp_path) as rig, asked(rig, bounds=BOUNDS) as client:
        files = {"file": ("in.jsonl", b"x" * 6_000_000)}
        with largest_file(0):
            answer = await client.post("/v1/files", files=files, data={"purpose": "batch"})
        assert (answer.status_code, answer.json()["error"]["message"]) == (507, TEMPORARY)
        assert await num_kept(rig) == 0
        await upload(client, b"x" * 6_000_000)
    assert not any(record.exc_info for record in caplog.records), "no traceback"


async def test_a_desk_whose_database_can_not_even_forget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the room is there again with the next upload."""

    async def pieces() -> AsyncIterator[bytes]:
        yield b"x" * 2_000_000

    async with opened(tmp_path) as rig:
        desk, drop = FileDesk(rig.files, BOUNDS, lambda: NOW_S), rig.files.drop

        async def failing(file_id: str) -> None:
            raise DiskFullError(DATABASE)

        await set_pages(rig.files._database, 100)
        monkeypatch.setattr(rig.files, "drop", failing)
        with pytest.raises(DiskFullError, match=DATABASE):
            await desk.store("t", "f", 2_000_000, pieces())
        monkeypatch.setattr(rig.files, "drop", drop)
        await set_pages(rig.files._database, 10_000)
        await desk.store("t", "f", 2_000_000, pieces())
        assert [file.filename for file in await rig.files.page("t", None, None, 9, ascending=True)]
        assert await num_kept(rig) == 1 + -(-2_000_000 // 2**18)


class FullPostgres(Exception):  # noqa: N818 - psycopg's own is DiskFull
    sqlstate = "53100"


async def test_postgresql_says_it_in_its_own_way(tmp_path: Path) -> None:
    async with Database(f"sqlite:///{tmp_path / 'batch.sqlite'}") as database:

        def fail(connection: Connection) -> None:
            raise DBAPIError("INSERT", None, FullPostgres("could not extend file"))

        with pytest.raises(DiskFullError, match=DATABASE):
            await database.call(fail)

        def fail_otherwise(connection: Connection) -> None:
            raise DBAPIError("INSERT", None, OSError(errno.ENOSPC, "of somebody else's"))

        with pytest.raises(DBAPIError):
            await database.call(fail_otherwise)


@pytest.mark.filterwarnings("ignore:Query string argument")  # SQLite's has no such ones
async def test_the_line_of_the_log_has_no_password(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(connection: Connection) -> None:
        raise DBAPIError("INSERT", None, FullPostgres("could not extend file"))

    url = f"sqlite:///{tmp_path / 'batch.sqlite'}?user=u&password=secret"
    async with Database(url) as database:
        with pytest.raises(DiskFullError):
            await database.call(fail)
    (record,) = caplog.records
    told = JSONFormatter("s").format(record)
    assert "batch.sqlite" in told
    assert "secret" not in told
