"""Batches under way beside each other: told of what is stored, and ended with their process."""

import asyncio
from pathlib import Path

import httpx
import pytest

from batch_server.runner.batch_run import BatchRun
from batch_server.runner.runner import Runner
from batch_server.status import BatchStatus
from tests.unit.batch_server.rig import BATCH, NOW_S, FakeRouters, line, opened
from tests.waiting import until


async def test_a_batch_whose_lines_are_with_routers_ends_once_it_is_cancelled(
    tmp_path: Path,
) -> None:
    class Silent(FakeRouters):
        async def __call__(self, request: httpx.Request) -> httpx.Response:
            self.asked.append(request)
            await asyncio.Event().wait()
            raise AssertionError

    routers = Silent()
    async with opened(tmp_path, routers) as rig, asyncio.TaskGroup() as tasks:
        await rig.add_input(line("a", "one"))
        await rig.add_batch()
        runner = Runner(rig.needs)
        running = tasks.create_task(runner.run(), name="runner")
        await until(lambda: routers.asked, 30, "its line is sent")
        await rig.batches.cancel("", BATCH, NOW_S)
        runner.look("batch_of_nobody")
        runner.look(BATCH)
        await until(lambda: not runner.num_open, 30, "it ends")
        running.cancel()
        assert (await rig.get()).status is BatchStatus.CANCELLED


async def test_a_batch_that_breaks_off_as_the_process_ends_does_not_begin_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_begun = 0

    async def run(self: BatchRun) -> None:
        nonlocal num_begun
        num_begun += 1
        try:
            await asyncio.Event().wait()
        finally:
            raise OSError("no room")

    monkeypatch.setattr(BatchRun, "run", run)
    async with opened(tmp_path) as rig, asyncio.TaskGroup() as tasks:
        runner = Runner(rig.needs, rig.needs.sleep)
        runner.begin(BATCH)
        running = tasks.create_task(runner.run(), name="runner")
        await until(lambda: num_begun, 30, "it begins")
        running.cancel()
    assert (num_begun, runner.num_open) == (1, 0)
