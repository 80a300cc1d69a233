"""How a pull reads its stream, and names its end."""

import asyncio
import gc
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from diptych.timers import Timers
from diptych.v1 import common_pb2, decode_pb2, kv_source_pb2
from kvtransfer.first_done import first_to_end
from kvtransfer.memory import HostMemory
from kvtransfer.reader.fetch_driver import MAX_UNWRITTEN_MESSAGES, FetchDriver, FetchPlan
from kvtransfer.reader.proven_link import Link
from kvtransfer.reader.pull_machine import PullError
from kvtransfer.reader.quarantine import Quarantine


class Call:
    """A Fetch stream that reads as ``last``."""

    def __init__(self, last: object) -> None:
        self.last = last

    def add_done_callback(self, callback: object) -> None: ...

    async def write(self, command: kv_source_pb2.FetchCommand) -> None: ...

    async def read(self) -> object:
        return self.last


def driver() -> FetchDriver:
    plan = FetchPlan(
        open=kv_source_pb2.FetchOpen(), end_token=16, prompt_digest=b"", local_block_ids=(0,)
    )
    link = Link(cast(Any, None), "nixl", cast(Any, None), lambda: None)
    endpoint = SimpleNamespace(thread=None, memory=HostMemory(bytearray(16), 16))
    return FetchDriver(
        plan, link, cast(Any, endpoint), Quarantine(lambda _: None, lambda _: None), Timers()
    )


@pytest.mark.parametrize(
    ("last", "why"),
    [
        (None, "a message of the source cannot be read"),
        (object(), "the source ended the stream"),  # gRPC's word for the end
    ],
)
async def test_what_cannot_be_read_is_told_from_an_end(last: object, why: str) -> None:
    with pytest.raises(PullError, match=why) as caught:
        await driver()._receive(cast(Any, Call(last)))
    assert caught.value.failure == decode_pb2.PULL_FAILURE_SOURCE_LOST


class RefusedCall(Call):
    """Its source refuses it while the first command is written."""

    def __init__(self) -> None:
        super().__init__(None)
        self.ended = error_of(grpc.StatusCode.PERMISSION_DENIED, "not for you")
        self.told: list[Callable[[Any], None]] = []

    def add_done_callback(self, callback: Any) -> None:
        self.told.append(callback)

    async def write(self, command: kv_source_pb2.FetchCommand) -> None:
        for callback in self.told:
            callback(self)
        self.ended = error_of(grpc.StatusCode.INTERNAL, "Internal error from Core")
        for callback in self.told:
            callback(self)
        raise self.ended

    async def read(self) -> object:
        raise self.ended

    async def code(self) -> grpc.StatusCode:
        return self.ended.code()

    async def details(self) -> str | None:
        return self.ended.details()

    async def initial_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata()

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata()


def error_of(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details, None)


async def test_a_source_that_refuses_while_we_write_is_not_lost() -> None:
    with pytest.raises(PullError, match="not for you") as caught:
        await driver()._receive(cast(Any, RefusedCall()))
    assert caught.value.failure == decode_pb2.PULL_FAILURE_TRANSPORT


class Beating(Call):
    """Its source only beats, and then ends it."""

    num_beats = MAX_UNWRITTEN_MESSAGES + 1

    async def read(self) -> object:
        self.num_beats -= 1
        if self.num_beats < 0:
            return self.last
        return kv_source_pb2.FetchEvent(heartbeat=common_pb2.Heartbeat())


async def test_heartbeats_take_no_room_in_the_window() -> None:
    """Only data does: nobody takes a heartbeat out of it."""
    with pytest.raises(PullError, match="ended the stream"):
        async with asyncio.timeout(2):
            await driver()._receive(cast(Any, Beating(object())))


class Waiting(Call):
    """Its source says nothing."""

    async def read(self) -> object:
        await asyncio.Event().wait()
        raise AssertionError("it was to wait")


async def test_a_pull_that_is_over_keeps_its_call_no_longer() -> None:
    """Else a channel to a source that is gone stayed open until the next collection of garbage."""

    async def pulled() -> weakref.ref[Call]:
        call = Waiting(None)
        known = weakref.ref[Call](call)
        receive = partial(driver()._receive, cast(Any, call))
        await first_to_end(receive=receive, drive=partial(asyncio.sleep, 0))
        return known

    gc.disable()
    try:
        known = await pulled()
        await asyncio.sleep(0)
        assert known() is None
    finally:
        gc.enable()
