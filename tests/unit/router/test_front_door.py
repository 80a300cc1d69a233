"""Room for requests is counted in bytes too; a client that takes nothing is noticed."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from diptych.errors import QueueFullError, all_reasons
from router.app import public_edge
from router.config import RouterConfig
from router.frontend.admission import Admission
from router.frontend.write_watch import WriteWatch
from router.telemetry import OUTCOMES


def admission(max_open_bytes: int) -> Admission:
    unused: Any = SimpleNamespace()
    config = RouterConfig(model="m", decode=["a:1"], max_open_bytes=max_open_bytes)
    return Admission(unused, unused, config)


async def test_open_requests_have_a_budget_of_bytes() -> None:
    door = admission(100)
    with door.hold(60):
        with pytest.raises(QueueFullError), door.hold(41):
            raise AssertionError("let in")
        with door.hold(40):
            assert door.num_open == 2
        with door.hold(40):
            pass
    assert door.num_open == 0
    with door.hold(100):
        pass
    await door.wait_idle()


async def test_a_request_that_fails_is_counted_out() -> None:
    door = admission(100)
    with pytest.raises(KeyError), door.hold(100):
        raise KeyError
    with door.hold(100):
        assert door.num_open == 1


def test_the_servers_limits_cover_what_the_router_takes() -> None:
    """Tokenising, waiting for a worker, queued, on workers; and health checks beside them."""
    config = RouterConfig(
        model="m", decode=["a:1"], max_queue=10, max_concurrent=100, max_request_bytes=1000
    )
    edge = public_edge(config)
    assert edge.max_concurrent_streams > 100 + 3 * 10 + 2
    assert edge.max_concurrent_rpcs > edge.max_concurrent_streams
    assert edge.max_receive_bytes == 1500


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


def test_each_reason_of_an_error_is_an_outcome() -> None:
    assert set(OUTCOMES) == {"ok", "cancelled", *all_reasons()}
    assert {"QUEUE_FULL", "STEP_FAILED"} <= set(OUTCOMES)
