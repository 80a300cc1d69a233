"""What an event loop's threads are at when nobody wants it any more."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

from diptych.loop_threads import loop_threads, stuck_at


def ours() -> ThreadPoolExecutor:
    threads = loop_threads()
    asyncio.get_running_loop().set_default_executor(threads)
    return threads


async def test_threads_without_work_end() -> None:
    threads = ours()
    await asyncio.to_thread(lambda: None)
    assert await stuck_at(threads, 5.0) is None


async def test_work_may_end_and_need_the_loop_for_it() -> None:
    threads, loop = ours(), asyncio.get_running_loop()

    def ask_the_loop() -> bool:
        return asyncio.run_coroutine_threadsafe(asyncio.sleep(0, True), loop).result(5.0)

    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(asyncio.to_thread(ask_the_loop))
        await asyncio.sleep(0)
        assert await stuck_at(threads, 5.0) is None
    assert asked.result()


async def test_what_goes_on_is_named() -> None:
    threads, enough = ours(), threading.Event()

    def wait_on() -> None:
        enough.wait()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(asyncio.to_thread(wait_on))
        await asyncio.sleep(0)
        at = await stuck_at(threads, 0.05)
        enough.set()
    assert at == f"{__name__}.test_what_goes_on_is_named.<locals>.wait_on"
