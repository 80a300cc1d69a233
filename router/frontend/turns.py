"""Work on the event loop in turns, so that other tasks run in between."""

import asyncio
from collections.abc import Callable, Iterable
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


async def one_by_one(work: Callable[[A], B], items: Iterable[A]) -> list[B]:
    """What ``work`` makes of each; one takes a moment, thousands would take seconds."""
    made = []
    for each in items:
        made.append(work(each))
        await asyncio.sleep(0)
    return made
