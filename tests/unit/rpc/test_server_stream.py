"""How a long stream ends: whose fault it was decides what is raised. No sockets."""

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import grpc
import pytest
from google.protobuf.message import Message

from diptych.errors import LeaseExpiredError, RouterLostError
from diptych.rpc.server import Context
from diptych.rpc.server_stream import ServerStream
from diptych.timers import Timers
from diptych.v1 import prefill_pb2


class FakeContext:
    """Notes what was written; each write takes ``seconds``, and fails with ``error``."""

    def __init__(self, error: Exception | None = None, seconds: float = 0) -> None:
        self.error = error
        self.seconds = seconds
        self.written: list[Message] = []

    async def write(self, message: Message) -> None:
        if self.error is not None:
            raise self.error
        await asyncio.sleep(self.seconds)
        self.written.append(message)


async def silence() -> AsyncIterator[prefill_pb2.PrefillCommand]:
    await asyncio.Event().wait()
    yield prefill_pb2.PrefillCommand()


def stream(
    context: FakeContext,
    timers: Timers,
    *events: Message,
    commands: AsyncIterator[prefill_pb2.PrefillCommand] | None = None,
) -> ServerStream[prefill_pb2.PrefillCommand]:
    unsent = list(events)
    return ServerStream(
        commands or silence(),
        cast(Context, context),
        timers=timers,
        take=lambda: unsent.pop(0) if unsent else None,
        beat=lambda: None,
    )


async def test_a_silent_router_is_lost() -> None:
    timers = Timers(heartbeat_s=0.005, lost_peer_s=0.01)
    with pytest.raises(RouterLostError) as caught:
        await stream(FakeContext(), timers).run(lambda _: None)
    assert (caught.value.code, caught.value.reason) == (
        grpc.StatusCode.UNAVAILABLE,
        "ROUTER_LOST",
    )


async def test_a_write_to_a_router_that_left_is_a_cancelled_call_and_no_bug() -> None:
    context = FakeContext(grpc.aio.UsageError("RPC already finished."))
    with pytest.raises(asyncio.CancelledError):
        await stream(context, Timers(), prefill_pb2.PrefillEvent()).run(lambda _: None)


async def test_any_other_error_of_a_write_is_a_bug() -> None:
    context = FakeContext(ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        await stream(context, Timers(), prefill_pb2.PrefillEvent()).run(lambda _: None)


@pytest.mark.parametrize("by_command", [False, True])
async def test_an_error_lets_the_message_leave_that_is_on_its_way(by_command: bool) -> None:
    """So that the last word can follow it; what waits behind it is not sent."""
    context = FakeContext(seconds=0.02)
    timers = Timers().model_copy(update={"lost_peer_s": 0.01})
    event, last = prefill_pb2.PrefillEvent(), prefill_pb2.PrefillEvent()
    last.ended.reason = "LEASE_EXPIRED"

    def fail(_: object = None) -> None:
        raise LeaseExpiredError("over")

    async def once() -> AsyncIterator[prefill_pb2.PrefillCommand]:
        await asyncio.sleep(0.01)
        yield prefill_pb2.PrefillCommand()
        await asyncio.Event().wait()

    broken = stream(context, timers, event, event, commands=once() if by_command else silence())
    if not by_command:
        asyncio.get_running_loop().call_later(0.01, broken.end, LeaseExpiredError("over"))
    with pytest.raises(LeaseExpiredError):
        await broken.run(fail)
    assert context.written == [event]
    context.seconds = 0
    await broken.tell(last)
    assert context.written == [event, last]


async def test_an_error_does_not_wait_for_a_message_that_is_stuck() -> None:
    context = FakeContext(seconds=60)
    broken = stream(context, Timers(heartbeat_s=0.02), prefill_pb2.PrefillEvent())
    asyncio.get_running_loop().call_later(0.001, broken.end, LeaseExpiredError("over"))
    async with asyncio.timeout(1):
        with pytest.raises(LeaseExpiredError):
            await broken.run(lambda _: None)
        await broken.tell(prefill_pb2.PrefillEvent())
    assert context.written == []


async def closing(after_s: float) -> AsyncIterator[prefill_pb2.PrefillCommand]:
    """Has nothing to say, and half-closes."""
    await asyncio.sleep(after_s)
    return
    yield prefill_pb2.PrefillCommand()


async def test_a_half_close_lets_the_message_leave_that_is_on_its_way() -> None:
    """Broken off, it would leave the call no room for its status; the router waits for that."""
    context = FakeContext(seconds=0.02)
    event = prefill_pb2.PrefillEvent()
    done = stream(context, Timers(), event, commands=closing(0.01))
    await done.run(lambda _: None)
    assert context.written == [event]
    assert not done.writing


async def test_a_half_close_does_not_wait_for_a_message_that_is_stuck() -> None:
    context = FakeContext(seconds=60)
    timers, event = Timers(heartbeat_s=0.02), prefill_pb2.PrefillEvent()
    async with asyncio.timeout(1):
        await stream(context, timers, event, commands=closing(0.001)).run(lambda _: None)
    assert context.written == []
