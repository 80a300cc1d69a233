"""How long a router that was told to stop goes on, with a clock of the test's."""

from collections.abc import Iterable, Iterator

import pytest

from diptych.timers import Timers
from router.leaving import until_quiet

TIMERS = Timers(lame_duck_s=1.0, leave_s=4.0)


class Clients:
    """So many requests come in each second; ``now_s`` is when it is."""

    def __init__(self, arriving: Iterable[int]) -> None:
        self._arriving: Iterator[int] = iter(arriving)
        self.num_arrived = 7
        self.now_s = 100.0

    async def sleep(self, time_s: float) -> None:
        self.now_s += time_s
        self.num_arrived += next(self._arriving)

    async def leave(self, timers: Timers = TIMERS) -> bool:
        return await until_quiet(lambda: self.num_arrived, timers, lambda: self.now_s, self.sleep)


@pytest.mark.parametrize("arriving", [[0], [5, 0], [1, 1, 1, 0]])
async def test_it_goes_on_until_nobody_has_asked_for_a_while(arriving: list[int]) -> None:
    clients = Clients(arriving)
    assert await clients.leave()
    assert clients.now_s == 100 + len(arriving)


async def test_it_does_not_go_on_for_ever() -> None:
    clients = Clients([1] * 100)
    assert not await clients.leave()
    assert clients.now_s == 100 + TIMERS.leave_s


async def test_where_nobody_can_go_elsewhere_it_waits_once() -> None:
    clients = Clients([1])
    assert not await clients.leave(TIMERS.model_copy(update={"leave_s": 0.0}))
    assert clients.now_s == 101
