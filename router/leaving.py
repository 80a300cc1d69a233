"""How a router that was told to stop sees its clients off: it serves until none asks any more."""

import asyncio
from collections.abc import Awaitable, Callable

from diptych.timers import Timers


async def until_quiet(
    num_arrived: Callable[[], int],
    timers: Timers,
    clock: Callable[[], float],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> bool:
    """Whether ``timers.lame_duck_s`` passed without a request, before ``timers.leave_s`` were over.

    gRPC cannot tell a client to go and serve it on: with GOAWAY it kills the calls that it has
    not handed over yet, and those that are on their way. So that comes only where nobody asks:
    balancers have looked away by then, and connections have ended of age, which harms none.
    """
    ends_s = clock() + timers.leave_s
    while True:
        num_before = num_arrived()
        await sleep(timers.lame_duck_s)
        if num_arrived() == num_before:
            return True
        if clock() >= ends_s:
            return False
