"""Waiting for what another process or task does."""

import asyncio
from collections.abc import Callable

_LOOK_EVERY_S = 0.01


async def until(
    condition: Callable[[], object], within_s: float = 5.0, what: str = "the condition holds"
) -> None:
    """Look again and again until ``condition()`` holds.

    Raises AssertionError, which says ``what`` did not happen, after ``within_s``.
    """
    try:
        async with asyncio.timeout(within_s):
            while not condition():
                await asyncio.sleep(_LOOK_EVERY_S)
    except TimeoutError:
        raise AssertionError(f"not within {within_s} s: {what}") from None
