"""A batch server's work on PostgreSQL, and what becomes of it when that is out of reach."""

import asyncio
import dataclasses
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from sqlalchemy import Connection, create_engine, text

from batch_server.records import LineError
from batch_server.runner.runner import Runner
from batch_server.status import BatchStatus
from batch_server.store import database
from batch_server.store.database import Database
from batch_server.store.tenant_room import NotAdded, TenantBounds
from diptych.errors import ConfigurationError, DatabaseAwayError
from tests import postgres
from tests.unit.batch_server.rig import NOW_S, Death, FakeRouters, KilledError, line, opened, texts

pytestmark = pytest.mark.skipif(bool(postgres.missing()), reason=postgres.missing())
LINES = b"".join(line(str(number), f"text {number}") for number in range(4))
END_OTHERS = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with postgres.postgres() as url:
        yield url


@pytest.fixture
def url(server: str) -> str:
    """Of an empty database."""
    engine = create_engine(server, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text("DROP SCHEMA public CASCADE"))
        connection.execute(text("CREATE SCHEMA public"))
    engine.dispose()
    return server


def end_sessions(url: str) -> None:
    """As a server that was started again leaves its clients."""
    engine = create_engine(url)
    with engine.connect() as connection:
        connection.execute(text(END_OTHERS))
    engine.dispose()


async def test_killed_anywhere_it_loses_and_repeats_nothing(tmp_path: Path, url: str) -> None:
    async with opened(tmp_path, url=url) as rig:
        await rig.add_input(LINES)
        await rig.add_batch()
    answered: list[bytes] = []
    for at in range(60):
        death = Death(at=at)
        routers = FakeRouters(death=death)
        with suppress(KilledError, BaseExceptionGroup):
            async with opened(tmp_path, routers, death=death, url=url) as rig:
                batch = await rig.run()
                lines = await rig.content(batch.output_file_id)
                break
        answered += [request.content for request in routers.asked]
    assert (batch.status, batch.num_completed) == (BatchStatus.COMPLETED, 4)
    assert len(texts(lines)) == 4
    assert len(set(answered)) <= 4, "each line is sent with the seed that it once got"


async def test_batches_that_have_failed_make_way(tmp_path: Path, url: str) -> None:
    bounds = TenantBounds(9, 10**9, max_record_bytes=1500)  # of one
    async with opened(tmp_path, url=url) as rig:
        await rig.add_batch("first")
        made = await rig.batches.get("first")
        assert made is not None
        second = dataclasses.replace(made, batch_id="second")
        assert await rig.batches.add(second, bounds) is NotAdded.RECORDS
        await rig.batches.refuse("first", [LineError("wrong", "x")], NOW_S)
        assert await rig.batches.add(second, bounds) is None
        left = await rig.batches.page("", None, 9)
    assert [batch.batch_id for batch in left] == ["second"]


async def test_a_second_server_is_refused_until_the_first_has_ended(url: str) -> None:
    async with Database(url):
        with pytest.raises(ConfigurationError, match="is used by another process"):
            async with Database(url):
                pass
    async with Database(url):
        pass


async def test_a_connection_that_broke_is_made_anew_and_the_batch_goes_on(
    tmp_path: Path, url: str
) -> None:
    async def at_once(pause_s: float) -> None:
        await asyncio.sleep(0)

    routers = FakeRouters()
    async with opened(tmp_path, routers, url=url) as rig, asyncio.TaskGroup() as tasks:
        await rig.add_input(LINES)
        await rig.add_batch(expires_s=NOW_S + 10**6)
        await asyncio.to_thread(end_sessions, url)
        runner = Runner(rig.needs, at_once)
        with suppress(DatabaseAwayError):
            await rig.get()
        running = tasks.create_task(runner.run(), name="runner")
        while (await rig.get()).status is not BatchStatus.COMPLETED:
            await asyncio.sleep(0)
        running.cancel()
        assert (await rig.get()).num_completed == 4


async def test_a_connection_to_a_standby_is_made_anew(url: str) -> None:
    """Another server may be the primary."""
    async with Database(url) as there:
        await there.call(look_like_standby)
        await there.call(forbid_writing)
        assert await there.call(one) == 1
        with pytest.raises(DatabaseAwayError):
            await there.call(write)
        await there.call(write)


async def test_a_primary_that_was_made_read_only_stays_locked(url: str) -> None:
    """Nobody else gets in meanwhile, and who has it goes on once it may be written to."""
    async with Database(url) as first:
        await first.call(forbid_writing)
        with pytest.raises(DatabaseAwayError):
            await first.call(write)
        with pytest.raises(ConfigurationError, match="is used by another process"):
            async with Database(url):
                pass
        with pytest.raises(DatabaseAwayError):
            await first.call(write)
        await first.call(allow_writing)
        await first.call(write)


async def test_a_server_from_which_another_took_the_database_ends(url: str) -> None:
    async with Database(url, relock_s=1) as first:
        keeping = asyncio.get_running_loop().create_task(first.keep())
        await asyncio.to_thread(end_sessions, url)
        with pytest.raises(DatabaseAwayError):
            await first.call(one)
        async with Database(url):
            with pytest.raises(ConfigurationError, match="another process"):
                await first.call(one)
            with pytest.raises(ConfigurationError, match="took it"):
                await keeping


async def test_the_lock_of_ones_own_session_is_waited_for(url: str) -> None:
    """The server may hear later than we do that a connection broke."""
    engine = create_engine(url)
    async with Database(url) as first:
        await asyncio.to_thread(end_sessions, url)
        with pytest.raises(DatabaseAwayError):
            await first.call(one)
        with engine.connect() as session:
            session.execute(text(f"SELECT pg_advisory_lock({database._PG_LOCK})"))
            asking = asyncio.get_running_loop().create_task(first.call(one))
            await asyncio.sleep(0.5)
            assert not asking.done()
        engine.dispose()
        assert await asking == 1


def forbid_writing(connection: Connection) -> None:
    connection.execute(text("SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY"))


def allow_writing(connection: Connection) -> None:
    connection.execute(text("SET SESSION CHARACTERISTICS AS TRANSACTION READ WRITE"))


def look_like_standby(connection: Connection) -> None:
    """To this session alone: its own function of that name comes before PostgreSQL's."""
    said = "FUNCTION public.pg_is_in_recovery() RETURNS boolean LANGUAGE sql AS 'SELECT true'"
    connection.execute(text(f"CREATE {said}"))
    connection.execute(text("SET search_path = public, pg_catalog"))


def write(connection: Connection) -> None:
    connection.execute(text("CREATE TABLE written (number integer)"))


def one(connection: Connection) -> int:
    return int(connection.execute(text("SELECT 1")).scalar_one())
