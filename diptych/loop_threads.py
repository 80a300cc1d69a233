"""The threads that an event loop's ``asyncio.to_thread`` works on, and their end.

What runs there should not be waited for when a process is to end: a disk that does not answer
keeps it for ever. Both the loop's own end and the interpreter's would.
"""

import asyncio
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import FrameType

_NAME = "beside-the-loop"
_POOL = {"threading", "concurrent.futures.thread"}  # what such a thread is in without work


def loop_threads() -> ThreadPoolExecutor:
    """For ``loop.set_default_executor``."""
    return ThreadPoolExecutor(thread_name_prefix=_NAME)


async def stuck_at(threads: ThreadPoolExecutor, patience_s: float) -> str | None:
    """Take no more work, and wait for what is under way. None: all has ended; else what has not.

    One set of such threads in a process. The loop goes on, as what ends may need it.
    """
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def end() -> None:
        threads.shutdown()
        with suppress(RuntimeError):  # the loop is closed: nobody waited that long
            loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=end, name=f"{_NAME}-end", daemon=True).start()
    try:
        async with asyncio.timeout(patience_s):
            await ended.wait()
    except TimeoutError:
        return ", ".join(_at_work())
    return None


def _at_work() -> list[str]:
    """The functions that such threads were given and are in."""
    named = {each.ident for each in threading.enumerate() if each.name.startswith(f"{_NAME}_")}
    works = [_work_of(frame) for ident, frame in sys._current_frames().items() if ident in named]
    return [work for work in works if work]


def _work_of(frame: FrameType | None) -> str:
    """The outermost function that is not the pool's own; empty: the thread has none."""
    work = ""
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if module not in _POOL:
            work = f"{module}.{frame.f_code.co_qualname}"
        frame = frame.f_back
    return work
