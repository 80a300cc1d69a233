"""Running several tasks of one job until the first of them ends."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


async def first_to_end(**works: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Call and run named coroutine functions in one task group until the first returns or raises.

    The others are cancelled and awaited. Raises what the first raised, or
    CancelledError if the caller was cancelled meanwhile. No task of the group ever
    raises: before Python 3.13 a group that fails while it is being left hides a
    cancellation of its owner.
    """
    outcomes: list[Exception | None] = []
    ended = asyncio.Event()

    async def follow(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - the caller gets it
            outcomes.append(error)
        else:
            outcomes.append(None)
        ended.set()

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(follow(work), name=name) for name, work in works.items()]
            await ended.wait()
            for task in tasks:
                task.cancel()
        error = outcomes[0]
    except asyncio.CancelledError as cancelled:
        cancelled.__traceback__ = None  # no reference cycle may keep a call, see ServerStream
        raise
    finally:
        outcomes.clear()  # the same
    if error is not None:
        try:
            raise error
        finally:
            del error
