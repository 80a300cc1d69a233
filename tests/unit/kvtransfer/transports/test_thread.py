"""The transfer thread runs jobs in order, polls until done, and ends clean."""

import asyncio
from collections.abc import Iterator

import pytest

from kvtransfer.transports.thread import TransferThread


@pytest.fixture
def thread() -> Iterator[TransferThread]:
    thread = TransferThread()
    thread.start()
    yield thread
    thread.stop()


async def test_jobs_run_in_order(thread: TransferThread) -> None:
    done: list[int] = []
    for number in range(20):
        thread.post(lambda number=number: done.append(number))  # type: ignore[misc]
    assert await thread.call(lambda: list(done)) == list(range(20))


async def test_errors_travel_to_the_caller(thread: TransferThread) -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await thread.call(fail)
    assert await thread.call(lambda: 1) == 1


async def test_pollers_run_until_they_are_done_and_jobs_meanwhile(thread: TransferThread) -> None:
    polls = 0
    finish = False
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()

    def poller() -> bool:
        nonlocal polls
        polls += 1
        if finish:
            loop.call_soon_threadsafe(ended.set)
        return finish

    thread.post(lambda: thread.poll(poller))
    while polls < 5:
        await thread.call(lambda: None)
    finish = True
    await ended.wait()
    at_end = polls
    for _ in range(5):
        await thread.call(lambda: None)
    assert polls == at_end


async def test_a_raising_poller_is_dropped_and_the_thread_lives(
    thread: TransferThread, caplog: pytest.LogCaptureFixture
) -> None:
    def poller() -> bool:
        raise RuntimeError("bug")

    thread.post(lambda: thread.poll(poller))
    async with asyncio.timeout(5):
        while not caplog.text:
            assert await thread.call(lambda: 1) == 1
    for _ in range(3):
        assert await thread.call(lambda: 1) == 1
    assert caplog.text.count("RuntimeError: bug") == 1


async def test_stop_finishes_what_was_queued() -> None:
    thread = TransferThread()
    thread.start()
    done: list[int] = []
    for number in range(100):
        thread.post(lambda number=number: done.append(number))  # type: ignore[misc]
    thread.stop()
    assert len(done) == 100
    TransferThread().stop()
