"""How a long stream ends: whose fault it was decides what is raised. No sockets."""

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import grpc
import pytest
from google.protobuf.message import Message

from diptych.errors import RouterLostError
from diptych.rpc import Context
from diptych.timers import Timers
from diptych.v1 import prefill_pb2
from diptych.worker.long_stream import LongStream


class FakeContext:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    async def write(self, message: Message) -> None:
        if self.error is not None:
            raise self.error


async def silence() -> AsyncIterator[prefill_pb2.PrefillCommand]:
    await asyncio.Event().wait()
    yield prefill_pb2.PrefillCommand()


def stream(
    context: FakeContext, timers: Timers, *events: Message
) -> LongStream[prefill_pb2.PrefillCommand]:
    unsent = list(events)
    return LongStream(
        silence(),
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
