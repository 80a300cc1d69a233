"""Waiting for what another process or task does."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

_LOOK_EVERY_S = 0.01
_MOST_OF_A_LOOK_S = 0.1  # that counts: whatever took longer did not run all the while


class Patience:
    """Time to wait, of which is used up what a running machine takes between two looks.

    A machine that stands still, or that gives this process no core, does not give one to what is
    waited for either: such time does not count. Of a deadline of 5 s are left 50 looks at least.
    """

    def __init__(self, within_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._left_s = within_s
        self._clock = clock
        self._looked_s = clock()

    def is_over(self) -> bool:
        """Whether it is used up; to be asked after each look."""
        now_s = self._clock()
        self._left_s -= min(now_s - self._looked_s, _MOST_OF_A_LOOK_S)
        self._looked_s = now_s
        return self._left_s <= 0


async def until(
    condition: Callable[[], object], within_s: float = 5.0, what: str = "the condition holds"
) -> None:
    """Look again and again until ``condition()`` holds.

    Raises AssertionError, which says ``what`` did not happen, after ``within_s`` of patience.
    """
    patience = Patience(within_s)
    while not condition():
        if patience.is_over():
            raise AssertionError(f"not within {within_s} s: {what}")
        await asyncio.sleep(_LOOK_EVERY_S)


@asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    """The block ends within so much patience. Raises TimeoutError, as ``asyncio.timeout`` does."""
    loop, patience = asyncio.get_running_loop(), Patience(seconds)
    async with asyncio.timeout(None) as limit:
        is_left = False

        def look() -> None:
            if is_left:
                return
            if patience.is_over():
                limit.reschedule(loop.time())
            else:
                loop.call_later(_LOOK_EVERY_S, look)

        look()
        try:
            yield
        finally:
            is_left = True
