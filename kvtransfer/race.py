"""Running several tasks of one job until the first of them ends."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class _EndedError(Exception):
    """Stops the group; never leaves this module."""


async def first_to_end(**tasks: Coroutine[Any, Any, None]) -> None:
    """Run named coroutines in one task group until the first returns or raises.

    The others are cancelled and awaited. Raises what the first raised.
    """
    try:
        async with asyncio.TaskGroup() as group:
            for name, coroutine in tasks.items():
                group.create_task(_end_group_after(coroutine), name=name)
    except BaseExceptionGroup as ended:
        errors = [error for error in ended.exceptions if not isinstance(error, _EndedError)]
        if errors:
            raise errors[0] from None


async def _end_group_after(coroutine: Coroutine[Any, Any, None]) -> None:
    await coroutine
    raise _EndedError
