"""A database that does not answer for the moment: clients are told to come back."""

import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError, OperationalError

from batch_server.store import database
from batch_server.store.database import Database
from diptych.errors import DatabaseAwayError
from tests.unit.batch_server.http_rig import asked, upload
from tests.unit.batch_server.rig import opened


async def test_a_file_that_somebody_else_writes_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(database, "_BUSY_MS", 10)
    async with opened(tmp_path) as rig, asked(rig) as client:
        body = {
            "input_file_id": await upload(client),
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }
        other = sqlite3.connect(tmp_path / "batch.sqlite", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        answer = await client.post("/v1/batches", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "database_away")
        assert answer.headers["retry-after"] == "1"
        other.execute("ROLLBACK")
        other.close()
        assert (await client.post("/v1/batches", json=body)).status_code == 200
    assert not any(record.exc_info for record in caplog.records), "no traceback"
    told = [vars(each) for each in caplog.records if "does not answer" in each.message]
    assert [each["error"] for each in told] == ["database is locked"]


class PostgresError(Exception):
    def __init__(self, sqlstate: str | None) -> None:
        super().__init__("of the driver")
        self.sqlstate = sqlstate


@pytest.mark.parametrize("sqlstate", ["08006", "57P01", "25006", None])
async def test_postgresql_that_is_restarted(tmp_path: Path, sqlstate: str | None) -> None:
    async with Database(f"sqlite:///{tmp_path / 'batch.sqlite'}") as there:

        def fail(connection: Connection) -> None:
            raise OperationalError("SELECT", None, PostgresError(sqlstate))

        with pytest.raises(DatabaseAwayError, match="try again later"):
            await there.call(fail)


async def test_what_does_not_pass_by_itself_is_no_such_error(tmp_path: Path) -> None:
    async with Database(f"sqlite:///{tmp_path / 'batch.sqlite'}") as there:

        def fail(connection: Connection) -> None:
            connection.exec_driver_sql("SELECT * FROM nowhere")

        def fail_of_postgresql(connection: Connection) -> None:
            raise OperationalError("SELECT", None, PostgresError("42P01"))

        for each in (fail, fail_of_postgresql):
            with pytest.raises(DBAPIError):
                await there.call(each)


async def test_an_error_repeats_nothing_that_clients_wrote(tmp_path: Path) -> None:
    async with Database(f"sqlite:///{tmp_path / 'batch.sqlite'}") as there:

        def fail(connection: Connection) -> None:
            connection.execute(text("SELECT :secret FROM nowhere"), {"secret": "my prompt"})

        with pytest.raises(DBAPIError) as caught:
            await there.call(fail)
    assert "nowhere" in str(caught.value)
    assert "my prompt" not in str(caught.value)
