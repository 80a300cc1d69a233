"""A stream to a worker: how it ends, and what waits to be sent over it. No sockets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import cast

import grpc
import pytest

from diptych.errors import DiptychError, LeaseExpiredError, NoWorkerError
from diptych.rpc.client_stream import ClientStream, CommandQueue, keep_open
from diptych.timers import Timers
from diptych.v1 import common_pb2
from tests.virtual_time import run_virtually

FAST = Timers(heartbeat_s=0.004, lost_peer_s=0.01, unsent_s=0.01)


class FakeCall:
    """Gives the numbers that a test puts in, then waits, as gRPC does, for its end."""

    def __init__(self, *events: int, error: grpc.RpcError | None = None, ends: bool = False):
        self._events = events
        self._error = error
        self._ends = ends
        self._cancelled = asyncio.Event()
        self.waits = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[int]:
        for event in self._events:
            yield event
        if self._error is not None:
            raise self._error
        if not self._ends:
            self.waits.set()
            await self._cancelled.wait()
            raise asyncio.CancelledError

    def add_done_callback(self, callback: object) -> None: ...

    def cancel(self) -> bool:
        self._cancelled.set()
        return True

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()


def stream(call: FakeCall, timers: Timers = FAST) -> ClientStream[int]:
    return ClientStream(call, timers, progress=lambda event: None)


async def ended(call: FakeCall, timers: Timers = FAST) -> DiptychError:
    read = stream(call, timers)
    error = await read.run(lambda event: None)
    assert call.is_cancelled, "the call is left open"
    assert read._timer is not None
    loop = asyncio.get_running_loop()
    assert read._timer.cancelled() or read._timer.when() <= loop.time(), "its peer is judged on"
    return error


async def test_the_peer_ends_it() -> None:
    assert "ended the stream" in (await ended(FakeCall(1, 2, ends=True))).message


async def test_the_peer_fails_it() -> None:
    metadata = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, metadata, metadata, "gone", None)
    assert (await ended(FakeCall(1, error=error))).message == "gone"


async def test_a_message_that_does_not_parse_ends_it() -> None:
    heard: list[int] = []

    class Unreadable(FakeCall):
        async def __aiter__(self) -> AsyncIterator[int]:
            yield 1
            yield cast(int, None)  # as grpc.aio does
            yield 2

    call = Unreadable()
    error = await stream(call, Timers()).run(heard.append)
    assert isinstance(error, NoWorkerError)
    assert "cannot be read" in error.message
    assert heard == [1]
    assert call.is_cancelled


async def test_a_status_whose_details_do_not_parse_ends_it() -> None:
    trailing = grpc.aio.Metadata(("grpc-status-details-bin", b"\xff\xff"))
    error = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), trailing, "gone", None
    )
    lost = await ended(FakeCall(1, error=error))
    assert (lost.code, lost.reason, lost.message) == (
        grpc.StatusCode.UNAVAILABLE,
        "UNAVAILABLE",
        "gone",
    )


async def test_a_silent_peer_is_lost() -> None:
    error = await ended(FakeCall(1))
    assert isinstance(error, NoWorkerError)
    assert "silent" in error.message


async def test_a_peer_whose_engine_stands_still_is_lost() -> None:
    stuck = common_pb2.EngineProgress(num_steps=1, step_due=True, predicted_step_s=0.001)

    class Heartbeats(FakeCall):
        async def __aiter__(self) -> AsyncIterator[int]:
            while not self.is_cancelled:
                await asyncio.sleep(0.001)
                yield 0
            raise asyncio.CancelledError

    ending = ClientStream(Heartbeats(), FAST, progress=lambda event: stuck)
    assert "no engine step" in (await ending.run(lambda event: None)).message


async def test_an_error_of_the_listener_ends_it() -> None:
    heard: list[int] = []

    def on_event(event: int) -> DiptychError | None:
        heard.append(event)
        return LeaseExpiredError("over") if event == 2 else None

    call = FakeCall(1, 2, 3)
    assert isinstance(await stream(call, Timers()).run(on_event), LeaseExpiredError)
    assert heard == [1, 2]
    assert call.is_cancelled


async def test_cancelling_the_task_is_no_lost_peer() -> None:
    call = FakeCall(1)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(stream(call, Timers()).run(lambda event: None))
        await call.waits.wait()
        running.cancel()
    assert running.cancelled()
    assert call.is_cancelled


async def test_what_cannot_be_sent_ends_it() -> None:
    timers = Timers(heartbeat_s=0.004, unsent_s=0.01)
    outbox = CommandQueue(timers, lambda: "beat", max_unsent=1)
    outbox.put("one")
    call = FakeCall(1)
    ending = ClientStream(call, timers, progress=lambda event: None, stuck=outbox.problem)
    assert "unsent" in (await ending.run(lambda event: None)).message


@pytest.mark.parametrize("heartbeat_s", [1.0, 0.1])
def test_streams_of_one_process_are_checked_at_the_same_moments(heartbeat_s: float) -> None:
    """Whenever they began: it wakes up once for all of them."""
    timers = Timers(heartbeat_s=heartbeat_s, lost_peer_s=1000.0)
    checked_s: list[list[float]] = [[] for _ in range(7)]

    async def run() -> None:
        loop = asyncio.get_running_loop()

        async def begin(times_s: list[float], after_s: float) -> None:
            await asyncio.sleep(after_s)
            seen = ClientStream(
                FakeCall(1),
                timers,
                progress=lambda event: None,
                stuck=lambda: times_s.append(loop.time()),
            )
            await seen.run(lambda event: None)

        with suppress(TimeoutError):
            async with asyncio.timeout(20 * heartbeat_s), asyncio.TaskGroup() as tasks:
                for place, times_s in enumerate(checked_s):
                    tasks.create_task(begin(times_s, 0.07 * place * heartbeat_s))

    run_virtually(run())
    first, *others = checked_s
    assert len(first) >= 78  # four times a heartbeat
    assert all(len(times_s) >= len(first) - 3 for times_s in others)
    assert {moment for times_s in others for moment in times_s} <= set(first)


async def next_of(commands: AsyncIterator[str]) -> str:
    return await anext(commands)


async def test_commands_are_sent_in_order_and_heartbeats_in_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 100.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now_s)
    outbox = CommandQueue(FAST, lambda: "beat", max_unsent=1)
    outbox.put("one")
    assert outbox.problem() is None
    outbox.put("two")
    assert "2 commands" in str(outbox.problem())
    commands = outbox.commands()
    assert [await anext(commands) for _ in range(2)] == ["one", "two"]
    async with asyncio.TaskGroup() as tasks:
        third = tasks.create_task(next_of(commands))
        await asyncio.sleep(0)  # it waits now, for a command or for its time
        now_s += FAST.heartbeat_s
    assert third.result() == "beat"
    assert outbox.problem() is None
    outbox.put("three")
    outbox.end()
    outbox.put("four")
    assert [command async for command in commands] == []


async def test_a_command_after_a_long_rest_has_as_much_time_as_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 100.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now_s)
    outbox = CommandQueue(FAST, lambda: "beat", max_unsent=9)
    now_s += 60.0
    outbox.put("one")
    assert outbox.problem() is None
    now_s += FAST.unsent_s / 2
    outbox.put("two")
    now_s += FAST.unsent_s
    assert "commands are unsent for" in str(outbox.problem())


async def test_the_pause_grows_until_a_stream_was_up(monkeypatch: pytest.MonkeyPatch) -> None:
    was_up = iter([False, False, False, False, False, True, False])
    pauses: list[float] = []

    async def hold() -> bool:
        return next(was_up)

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 7:
            raise asyncio.CancelledError

    monkeypatch.setattr(asyncio, "sleep", pause)
    with pytest.raises(asyncio.CancelledError):
        await keep_open(hold)
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.0, 0.1, 0.2]
