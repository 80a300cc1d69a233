"""Cancellation that whoever waits for others kept to himself."""

import asyncio


def is_told_to_end() -> bool:
    """Whether the task that calls was cancelled: else a CancelledError is of what it waited for.

    Who asks keeps no name of its own task: an exception that is raised beside it would hold the
    task, and the task the exception, with all that their frames know, until the next full
    collection of garbage.
    """
    task = asyncio.current_task()
    return task is not None and bool(task.cancelling())


def pass_on_cancellation() -> None:
    """Raises CancelledError: the task that calls was told to end, and has not heard it.

    ``asyncio.wait_for`` of CPython 3.11, by which libraries wait, takes a result that comes at
    the same moment for the end of the wait; a task group of 3.11 and 3.12 whose child fails
    while it is cancelled raises what the child did. Neither says anything of the cancellation.
    """
    if is_told_to_end():
        raise asyncio.CancelledError
