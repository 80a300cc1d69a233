"""One database, one process."""

import asyncio
import stat
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from sqlalchemy import Connection, make_url

from batch_server.store import database as database_module
from batch_server.store.batches import BatchStore
from batch_server.store.database import Database
from diptych.errors import ConfigurationError


async def test_a_second_process_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'batch.sqlite'}"
    async with Database(url):
        with pytest.raises(ConfigurationError, match="is used by another process"):
            async with Database(url):
                pass
    async with Database(url) as database:
        assert await BatchStore(database).open_ids() == []


async def test_another_name_of_the_same_file_is_refused_too(tmp_path: Path) -> None:
    other = tmp_path / "other.sqlite"
    other.symlink_to(tmp_path / "batch.sqlite")
    async with Database(f"sqlite:///{tmp_path / 'batch.sqlite'}"):
        with pytest.raises(ConfigurationError, match="is used by another process"):
            async with Database(f"sqlite:///{other}"):
                pass


async def test_what_is_stored_is_on_the_disk_before_it_counts_as_stored(tmp_path: Path) -> None:
    """SQLite's own default loses the last of it where the machine ends."""
    async with Database(f"sqlite:///{tmp_path / 'batch.sqlite'}") as database:
        full = await database.call(
            lambda connection: connection.exec_driver_sql("PRAGMA synchronous").scalar_one()
        )
    assert full == 2


async def test_nobody_else_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "batch.sqlite"
    async with Database(f"sqlite:///{path}"):
        for each in (path, tmp_path / "batch.sqlite-wal"):
            assert stat.S_IMODE(each.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("nothing", "is no URL"),
        ("postgresql+psycopg://u:secret@host:65x/d", "is no URL"),
        ("postgresql+psycopg://u:12@34:secret@host/d", "is no URL"),
        ("postgresql+psycopg://u:12@34:secret/d", "is no URL"),
        ("sqlite://", "expected a file"),
        ("sqlite:///file:batch.sqlite?uri=true", "expected a file"),
        ("sqlite:////no/such/folder/batch.sqlite", "No such file"),
        ("sqlite:///batch.sqlite?timeout=soon", "could not convert string to float: 'soon'"),
        ("sqlite:///batch.sqlite?timeout=1&timeout=2", "not 'tuple'"),
        ("mysql://secret@here/there", "sqlite or postgresql"),
        ("postgresql://u:secret@here/there", r"or postgresql\+psycopg, not postgresql$"),
        ("postgresql+asyncpg://u:secret@here/there", r"not postgresql\+asyncpg$"),
        ("sqlite+pysqlite_numeric:///batch.sqlite", "not sqlite"),
        ("sqlite+nothing:///batch.sqlite", "not sqlite"),
    ],
)
async def test_a_wrong_setting_is_one_line(
    url: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=why) as caught:
        async with Database(url):
            pass
    assert caught.value.message.startswith("--database: ")
    assert "secret" not in caught.value.message
    assert "\n" not in caught.value.message


async def test_a_call_whose_caller_was_cancelled_is_made_in_its_turn(tmp_path: Path) -> None:
    go_on, made = threading.Event(), list[str]()

    def first(connection: Connection) -> None:
        assert go_on.wait(60)

    url = f"sqlite:///{tmp_path / 'batch.sqlite'}"
    async with Database(url) as database, asyncio.TaskGroup() as tasks:
        tasks.create_task(database.call(first), name="first")
        await asyncio.sleep(0)
        left = tasks.create_task(database.call(lambda _: made.append("left")), name="left")
        await asyncio.sleep(0)
        left.cancel()
        with suppress(asyncio.CancelledError):
            await left
        go_on.set()
        await database.call(lambda _: made.append("next"))
    assert made == ["left", "next"]


async def test_a_server_from_which_another_took_the_database_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL ends a session that it hears nothing of, and with it the lock."""

    def locked(*asked: object) -> None:
        raise ConfigurationError("--database: it is used by another process")

    async with Database(f"sqlite:///{tmp_path / 'batch.sqlite'}") as database:
        keeping = asyncio.get_running_loop().create_task(database.keep())
        await database.call(lambda connection: None)
        assert not keeping.done()
        with monkeypatch.context() as patch:
            patch.setattr(database, "_transact", locked)
            with pytest.raises(ConfigurationError, match="another process"):
                await database.call(lambda connection: None)
        with pytest.raises(ConfigurationError, match="took it"):
            await keeping


def test_a_connection_to_postgres_that_is_lost_without_a_word_ends_soon() -> None:
    url = make_url("postgresql+psycopg://h/d?keepalives_idle=60")
    lively = database_module._lively(url)
    assert lively.keys() == database_module._PG_LIVELINESS.keys() - {"keepalives_idle"}
