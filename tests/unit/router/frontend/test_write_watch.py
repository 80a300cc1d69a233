"""A client that takes nothing is noticed."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from router.frontend.write_watch import WriteWatch


class Loop:
    """An event loop's clock and timers, by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, Any]] = []
        self.num_timers = 0

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, call: Any) -> Any:
        self.num_timers += 1
        self.timers.append((when, call))
        return SimpleNamespace(cancel=lambda: self.timers.clear())

    def advance(self, seconds: float) -> None:
        self.now += seconds
        due = [timer for timer in self.timers if timer[0] <= self.now]
        self.timers = [timer for timer in self.timers if timer[0] > self.now]
        for _, call in due:
            call()


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    made = Loop()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: made)
    return made


def test_one_write_that_takes_too_long_is_noticed_once(loop: Loop) -> None:
    stuck: list[float] = []
    watch = WriteWatch(10.0, lambda: stuck.append(loop.now))
    watch.begin()
    loop.advance(6)
    watch.end()
    watch.begin()  # the next: its own time begins now
    loop.advance(5)
    assert stuck == []
    loop.advance(5)
    assert stuck == [16.0]
    loop.advance(50)
    assert stuck == [16.0]


def test_many_quick_writes_share_one_timer(loop: Loop) -> None:
    watch = WriteWatch(10.0, lambda: pytest.fail("stuck"))
    for _ in range(1000):
        watch.begin()
        loop.advance(0.009)
        watch.end()
    assert loop.num_timers == 1
    watch.close()
    assert not loop.timers


def test_each_part_that_is_taken_has_its_own_time(loop: Loop) -> None:
    stuck: list[float] = []
    taken_s = -1.0
    watch = WriteWatch(10.0, lambda: stuck.append(loop.now), lambda: taken_s)
    watch.begin()
    for _ in range(9):
        loop.advance(8)
        taken_s = loop.now
    assert stuck == []
    loop.advance(8)
    assert stuck == []
    loop.advance(2)
    assert stuck == [82.0]


def test_a_write_that_begins_long_after_the_last_one_is_watched_too(loop: Loop) -> None:
    stuck: list[float] = []
    watch = WriteWatch(10.0, lambda: stuck.append(loop.now))
    watch.begin()
    watch.end()
    loop.advance(60)
    watch.begin()
    loop.advance(10)
    assert stuck == [70.0]
