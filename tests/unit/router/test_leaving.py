"""How long a router that was told to stop goes on, with a clock of the test's."""

import asyncio
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from diptych.rpc.open_calls import OpenCalls
from diptych.timers import Timers
from router.app import drain
from router.leaving import until_quiet
from tests.virtual_time import run_virtually

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


class Door:
    """Host and admission of a router with one request, which comes with the GOAWAY."""

    num_open = 1

    def __init__(self, request_s: float) -> None:
        self.refused_at_s: float | None = None  # what came from then on
        self.cut_off_at_s: float | None = None
        self.was_idle = asyncio.Event()
        asyncio.get_running_loop().call_later(request_s, self.was_idle.set)
        self.server = self  # of the host
        self.calls = OpenCalls()

    def drain(self) -> None:
        self.refused_at_s = asyncio.get_running_loop().time()

    def cut_off(self) -> None:
        self.cut_off_at_s = asyncio.get_running_loop().time()
        self.was_idle.set()

    async def wait_idle(self) -> None:
        await self.was_idle.wait()

    async def stop(self, grace_s: float) -> None:
        """Of the server: what gRPC still has is over."""


@pytest.mark.parametrize("lame_duck_s", [0.25, 20.0, 60.0])
def test_what_comes_with_the_goaway_has_time_to_end(
    lame_duck_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    """However late balancers look away."""

    async def end() -> tuple[float | None, float]:
        door: Any = Door(request_s=12.0)
        await drain(door, None, door, Timers(lame_duck_s=lame_duck_s, drain_s=20.0))
        return door.refused_at_s, asyncio.get_running_loop().time()

    refused_at_s, ended_s = run_virtually(end())
    assert refused_at_s == min(lame_duck_s, 10.0)
    assert ended_s == 12.0
    assert caplog.messages == []


def test_what_outlasts_the_time_to_drain_is_counted_as_cut_off() -> None:
    async def end(request_s: float) -> float | None:
        door: Any = Door(request_s)
        await drain(door, None, door, Timers(drain_s=20.0))
        cut_off_at_s: float | None = door.cut_off_at_s
        return cut_off_at_s

    assert run_virtually(end(19.0)) is None
    assert run_virtually(end(21.0)) == 20.0
