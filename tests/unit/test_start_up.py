"""Who is told to stop does not wait for what was to be there first."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any

import pytest

from diptych.process import UnfinishedStartError
from diptych.progress import abandonable, silent
from diptych.start_up import entered_unless_stopped, unless_stopped
from diptych.timers import Timers
from router import app
from router.config import RouterConfig
from tests.waiting import within


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def polling(abandoned: threading.Event) -> int:
    """As a download does, which tells how far it is."""
    report = abandonable(silent, abandoned)
    while True:
        report("downloading", 0.5)


async def test_what_is_done_before_is_what_is_returned(thread: ThreadPoolExecutor) -> None:
    made = await unless_stopped(
        lambda abandoned: 3, asyncio.Event(), thread=thread, patience_s=1.0, name="counting"
    )
    assert made == 3


async def test_what_goes_wrong_is_raised(thread: ThreadPoolExecutor) -> None:
    def failing(abandoned: threading.Event) -> None:
        raise OSError("no such file")

    with pytest.raises(OSError, match="no such file"):
        await unless_stopped(
            failing, asyncio.Event(), thread=thread, patience_s=1.0, name="reading"
        )


async def test_who_is_told_to_stop_gives_the_work_up(thread: ThreadPoolExecutor) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().call_soon(stop.set)
    async with within(5.0):
        made = await unless_stopped(polling, stop, thread=thread, patience_s=60.0, name="polling")
    assert made is None


async def test_work_that_does_not_come_back_is_left(thread: ThreadPoolExecutor) -> None:
    goes_on, stop = threading.Event(), asyncio.Event()
    stop.set()

    def hang(abandoned: threading.Event) -> None:
        goes_on.wait(60)

    try:
        with pytest.raises(UnfinishedStartError, match="a thread goes on with hanging"):
            await unless_stopped(hang, stop, thread=thread, patience_s=0.01, name="hanging")
    finally:
        goes_on.set()


async def test_a_router_that_is_told_to_stop_while_it_fetches_its_model_stops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(config: RouterConfig, abandoned: threading.Event) -> Any:
        polling(abandoned)

    monkeypatch.setattr(app, "_load_model", load)
    timers = Timers(drain_s=60.0)
    config = RouterConfig(model="x", decode=["127.0.0.1:1"], http=False, timers=timers)
    stop = asyncio.Event()
    asyncio.get_running_loop().call_soon(stop.set)
    async with within(5.0):
        await app.serve(config, stop, lambda port: None)


class Opening:
    """A context that is entered once it may."""

    def __init__(self) -> None:
        self.may, self.begun = asyncio.Event(), asyncio.Event()
        self.is_open = False
        self.error: Exception | None = None

    async def __aenter__(self) -> None:
        self.begun.set()
        await self.may.wait()
        if self.error is not None:
            raise self.error
        self.is_open = True

    async def __aexit__(self, *error: object) -> None:
        self.is_open = False


async def entered(opening: Opening, stop: asyncio.Event) -> bool:
    """Whether it is open, and it is no more in the end."""
    async with asyncio.TaskGroup() as tasks, AsyncExitStack() as stack:
        found = await entered_unless_stopped(
            opening, stop, stack=stack, tasks=tasks, name="opening"
        )
        assert found is opening.is_open
        await asyncio.sleep(0)  # nothing is left that would cancel it
    assert not opening.is_open
    return found


async def test_what_can_be_entered_is() -> None:
    opening, stop = Opening(), asyncio.Event()
    opening.may.set()
    async with within(2):
        assert await entered(opening, stop)


async def test_who_is_stopped_enters_nothing_more() -> None:
    opening, stop = Opening(), asyncio.Event()
    async with within(2), asyncio.TaskGroup() as tasks:
        entering = tasks.create_task(entered(opening, stop))
        await opening.begun.wait()
        stop.set()
    assert not entering.result()


async def test_who_is_stopped_just_as_it_enters_may_do_either() -> None:
    opening, stop = Opening(), asyncio.Event()
    async with within(2), asyncio.TaskGroup() as tasks:
        entering = tasks.create_task(entered(opening, stop))
        await opening.begun.wait()
        opening.may.set()
        stop.set()
    assert entering.result() in (True, False)


async def test_what_fails_as_it_is_entered_is_told() -> None:
    opening, stop = Opening(), asyncio.Event()
    opening.error = ValueError("no such device")
    opening.may.set()
    async with within(2):
        with pytest.raises(ExceptionGroup) as caught:
            await entered(opening, stop)
    assert caught.group_contains(ValueError, match="no such device")


async def test_who_is_cancelled_is_not_stopped() -> None:
    opening, stop = Opening(), asyncio.Event()
    async with within(2), asyncio.TaskGroup() as tasks:
        entering = tasks.create_task(entered(opening, stop))
        await opening.begun.wait()
        entering.cancel()
    assert entering.cancelled()
