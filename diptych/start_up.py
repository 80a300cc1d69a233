"""Long work at start-up, which whoever is told to stop does not wait for."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

from diptych.process import StuckThreadError
from diptych.progress import AbandonedError

T = TypeVar("T")


async def unless_stopped(
    work: Callable[[threading.Event], T],
    stop: asyncio.Event,
    *,
    thread: Executor,
    patience_s: float,
    name: str,
) -> T | None:
    """What ``work`` returns, done on ``thread``; None: ``stop`` was set before.

    ``work`` gets an event, and raises AbandonedError soon after that is set. Raises what it
    raises; StuckThreadError: it goes on ``patience_s`` after that, ``name`` says at what.
    """
    abandoned = threading.Event()
    working = asyncio.get_running_loop().run_in_executor(thread, work, abandoned)
    async with asyncio.TaskGroup() as tasks:
        stopping = tasks.create_task(stop.wait(), name=f"stop while {name}")
        try:
            await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            abandoned.set()
            stopping.cancel()
    if not working.done():
        await asyncio.wait((working,), timeout=patience_s)
        if not working.done():
            raise StuckThreadError(f"a thread is stuck at {name}")
    try:
        return await working
    except AbandonedError:
        return None
