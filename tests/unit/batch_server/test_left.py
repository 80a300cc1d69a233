"""Clients that leave, a database or a router that does not answer: what is done all the same."""

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import Connection

from batch_server.desk.batches import BatchDesk
from batch_server.desk.files import FileDesk, UploadBounds
from batch_server.records import StoredFile
from batch_server.runner import batch_run
from batch_server.runner.runner import Runner
from batch_server.status import BatchStatus
from batch_server.store import database
from batch_server.store.batches import BatchStore
from batch_server.store.database import Database
from batch_server.store.tenant_room import TenantBounds
from diptych.errors import DatabaseAwayError, NotFoundError
from diptych.process import StuckThreadError
from tests.unit.batch_server.rig import BATCH, NOW_S, FakeRouters, Rig, held_up, line, opened
from tests.waiting import until

LINES = b"".join(line(str(number), f"text {number}") for number in range(8))
OTHERS = "somebody else"


class Gated(FakeRouters):
    """Answer nothing before they are let."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        await self.gate.wait()
        return await super().__call__(request)


def desk_of(rig: Rig, runner: Runner) -> BatchDesk:
    return BatchDesk(rig.batches, rig.files, runner, TenantBounds(2, 10**6), lambda: NOW_S)


async def is_sent(rig: Rig) -> None:
    while (await rig.get()).status is not BatchStatus.IN_PROGRESS:
        await asyncio.sleep(0)


async def test_a_batch_whose_client_left_is_cancelled_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    routers, begun = Gated(), asyncio.Event()
    async with opened(tmp_path, routers) as rig, asyncio.TaskGroup() as tasks:
        await rig.add_input(LINES)
        await rig.add_batch()
        runner = Runner(rig.needs)
        running = tasks.create_task(runner.run(), name="runner")
        await is_sent(rig)
        with held_up(monkeypatch, "batch_server.store.batches._cancel", begun) as go_on:
            asking = tasks.create_task(desk_of(rig, runner).cancel("", BATCH), name="cancel")
            await begun.wait()
            asking.cancel()
            go_on()
            with suppress(asyncio.CancelledError):
                await asking
        await until(lambda: not runner.num_open, 30, "the batch ends")
        running.cancel()
        batch = await rig.get()
    assert batch.status is BatchStatus.CANCELLED
    assert (batch.num_completed, routers.asked) == (0, [])


async def test_nobody_cancels_what_is_somebody_elses(tmp_path: Path) -> None:
    routers = Gated()
    async with opened(tmp_path, routers) as rig, asyncio.TaskGroup() as tasks:
        await rig.add_input(LINES)
        await rig.add_batch()
        runner = Runner(rig.needs)
        running = tasks.create_task(runner.run(), name="runner")
        await is_sent(rig)
        with pytest.raises(NotFoundError):
            await desk_of(rig, runner).cancel(OTHERS, BATCH)
        routers.gate.set()
        await until(lambda: not runner.num_open, 30, "the batch ends")
        running.cancel()
        batch = await rig.get()
    assert (batch.status, batch.num_completed) == (BatchStatus.COMPLETED, 8)


async def test_what_could_not_be_stored_is_not_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_results, failures = BatchStore.add_results, ["the disk is full"] * 5

    async def failing(self: BatchStore, *args: Any, **options: Any) -> None:
        if failures:
            raise OSError(failures.pop())
        await add_results(self, *args, **options)

    monkeypatch.setattr(BatchStore, "add_results", failing)
    routers = FakeRouters()
    async with opened(tmp_path, routers, max_concurrent=4) as rig:
        await rig.add_input(LINES)
        await rig.add_batch(expires_s=NOW_S + 10**6)
        batch = await rig.run()
    assert (batch.num_completed, len(routers.asked), failures) == (8, 8, [])


@pytest.mark.parametrize("name", ["body", "get", "unanswered"])
async def test_what_cannot_be_read_for_a_while_breaks_off_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As while PostgreSQL is started again, amid eight lines under way."""
    read, left = getattr(BatchStore, name), [None] * 5

    async def failing(self: BatchStore, *args: Any) -> Any:
        if left and routers.asked:
            left.pop()
            raise OSError("connection refused")
        return await read(self, *args)

    monkeypatch.setattr(BatchStore, name, failing)
    routers = FakeRouters()
    async with opened(tmp_path, routers, max_concurrent=4) as rig, asyncio.TaskGroup() as tasks:
        await rig.add_input(LINES)
        await rig.add_batch(expires_s=NOW_S + 10**6)
        runner = Runner(rig.needs, rig.needs.sleep)
        running = tasks.create_task(runner.run(), name="runner")
        while not routers.asked:
            await asyncio.sleep(0)
        runner.look(BATCH)
        await until(lambda: not runner.num_open, 30, "the batch ends")
        running.cancel()
    assert len(routers.asked) == 8


@pytest.mark.parametrize("end", ["window", "cancel"])
async def test_what_was_answered_in_time_is_stored_however_long_that_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """The window ends, or its owner wants no more, while the database is away."""
    add_results, failures = BatchStore.add_results, ["it is locked"] * 5
    monkeypatch.setattr(batch_run, "_LOOK_S", 0.01)

    async def failing(self: BatchStore, *args: Any, **options: Any) -> None:
        if len(failures) == 5 and end == "window":
            rig.clock_s += 10**7
        elif len(failures) == 5:
            await self.cancel("", BATCH, NOW_S)
            rig.one.look()
        if failures:
            await asyncio.sleep(0.05)
            raise OSError(failures.pop())
        await add_results(self, *args, **options)

    monkeypatch.setattr(BatchStore, "add_results", failing)
    async with opened(tmp_path, max_concurrent=1) as rig:
        await rig.add_input(line("a", "one"))
        await rig.add_batch(expires_s=NOW_S + 10**6)
        batch = await rig.run()
        output = await rig.content(batch.output_file_id)
    ended = BatchStatus.COMPLETED if end == "window" else BatchStatus.CANCELLED
    assert (batch.status, batch.num_completed, batch.num_failed) == (ended, 1, 0)
    assert [each["custom_id"] for each in output] == ["a"]


@pytest.mark.parametrize("num_turns", range(12))
async def test_a_runner_that_is_told_to_end_while_something_breaks_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_turns: int
) -> None:
    """A group of tasks of CPython 3.11 raises what its child did instead of the cancellation."""
    routers = Gated()

    async def failing(self: BatchStore, *args: Any, **options: Any) -> None:
        raise OSError("the disk is full")

    async def asleep(pause_s: float) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("batch_server.runner.batch_run._STORE_ATTEMPTS", 1)
    monkeypatch.setattr(BatchStore, "add_results", failing)
    async with opened(tmp_path, routers) as rig:
        await rig.add_input(LINES)
        await rig.add_batch()
        runner = Runner(rig.needs, asleep)
        running = asyncio.get_running_loop().create_task(runner.run())
        await is_sent(rig)
        for _ in range(30):
            await asyncio.sleep(0)
        routers.gate.set()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        running.cancel()
        await until(running.done, 5, "it ends")


async def test_what_a_failed_upload_left_takes_no_room_once_the_database_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_BUSY_MS", 10)
    async with opened(tmp_path) as rig:
        desk = FileDesk(rig.files, UploadBounds(10**6, 1_500_000, 30.0), lambda: NOW_S)
        other = sqlite3.connect(tmp_path / "batch.sqlite", isolation_level=None)

        async def pieces(*, is_locked: bool) -> AsyncIterator[bytes]:
            if is_locked:
                other.execute("BEGIN IMMEDIATE")
            yield b"x" * 900_000

        with pytest.raises(DatabaseAwayError):
            await desk.store("t", "f", 900_000, pieces(is_locked=True))
        other.execute("ROLLBACK")
        other.close()
        await desk.store("t", "f", 900_000, pieces(is_locked=False))


async def test_what_cannot_be_dropped_at_the_start_is_dropped_once_the_database_takes_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_BUSY_MS", 10)
    half = StoredFile(
        file_id="half", tenant="t", purpose="batch", filename="f", created_s=1, num_bytes=900_000
    )
    async with opened(tmp_path) as rig:
        assert await rig.files.begin(half, 10**9)
    async with opened(tmp_path) as rig:
        other = sqlite3.connect(tmp_path / "batch.sqlite", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        left = await rig.files.drop_unfinished()
        assert list(left) == ["half"]
        bounds = UploadBounds(10**6, 1_500_000, 30.0)
        desk = FileDesk(rig.files, bounds, lambda: NOW_S, left)
        other.execute("ROLLBACK")
        other.close()

        async def pieces() -> AsyncIterator[bytes]:
            yield b"x" * 900_000

        await desk.store("t", "f", 900_000, pieces())


async def test_a_database_that_does_not_answer_keeps_nobody(tmp_path: Path) -> None:
    answers = threading.Event()

    async def leave() -> None:
        async with Database(f"sqlite:///{tmp_path / 'b.sqlite'}", close_s=0.05) as stuck:
            asking = asyncio.get_running_loop().create_task(stuck.call(ask))
            await asyncio.sleep(0)
            asking.cancel()

    def ask(connection: Connection) -> None:
        answers.wait(60)

    try:
        with pytest.raises(StuckThreadError, match="database"):
            await leave()
    finally:
        answers.set()
