"""Cancellation that whoever waits for others kept to himself."""

import asyncio


def pass_on_cancellation() -> None:
    """Raises CancelledError: the task that calls was told to end, and has not heard it.

    ``asyncio.wait_for`` of CPython 3.11, by which libraries wait, takes a result that comes at
    the same moment for the end of the wait; a task group of 3.11 and 3.12 whose child fails
    while it is cancelled raises what the child did. Neither says anything of the cancellation.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
