"""Long work at start-up, which whoever is told to stop does not wait for."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Final, TypeVar

from diptych.process import UnfinishedStartError
from diptych.progress import AbandonedError

T = TypeVar("T")
_PATIENCE_S: Final = 3.0  # nothing is lost with the thread: who waits is a person, at Ctrl-C


async def unless_stopped(
    work: Callable[[threading.Event], T],
    stop: asyncio.Event,
    *,
    thread: Executor,
    name: str,
    patience_s: float = _PATIENCE_S,
) -> T | None:
    """What ``work`` returns, done on ``thread``; None: ``stop`` was set before.

    ``work`` gets an event, and raises AbandonedError soon after that is set. Raises what it
    raises; UnfinishedStartError: it goes on ``patience_s`` after that, ``name`` says at what.
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
            raise UnfinishedStartError(f"a thread goes on with {name}")
    try:
        return await working
    except AbandonedError:
        return None


async def entered_unless_stopped(
    context: AbstractAsyncContextManager[object],
    stop: asyncio.Event,
    *,
    stack: AsyncExitStack,
    tasks: asyncio.TaskGroup,
    name: str,
) -> bool:
    """Whether ``stack`` has entered ``context``; False: ``stop`` was set before, and it was
    cancelled as it was entered. Raises what that raises; ``name`` says what is waited for.
    """
    entering = asyncio.current_task()
    assert entering is not None
    was_stopped = False

    async def give_up() -> None:
        nonlocal was_stopped
        await stop.wait()
        was_stopped = True
        entering.cancel()

    giving_up = tasks.create_task(give_up(), name=f"stop while {name}")
    try:
        await stack.enter_async_context(context)
    except asyncio.CancelledError:
        if not was_stopped or entering.uncancel():  # somebody else wants its end, too
            raise
        return False
    finally:
        giving_up.cancel()
    return True
