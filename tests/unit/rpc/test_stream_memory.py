"""A stream that is over keeps nothing alive: gRPC's memory of a call is freed at once."""

import asyncio
import weakref
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from google.protobuf.message import Message

from diptych.errors import DiptychError, RouterLostError
from diptych.rpc.server import Context
from diptych.rpc.server_stream import ServerStream
from diptych.timers import Timers
from diptych.v1 import prefill_pb2


class Call:
    """Stands for gRPC's context."""

    async def write(self, message: Message) -> None:
        await asyncio.sleep(0)


class Owner:
    """Holds a stream, which calls it back, as the servicers' classes do."""

    def __init__(self, call: Call, commands: AsyncIterator[prefill_pb2.PrefillCommand]) -> None:
        self.unsent: list[Message] = [prefill_pb2.PrefillEvent()]
        self.stream: ServerStream[prefill_pb2.PrefillCommand] = ServerStream(
            commands, cast(Context, call), timers=Timers(), take=self.take, beat=self.beat
        )

    def take(self) -> Message | None:
        return self.unsent.pop() if self.unsent else None

    def beat(self) -> None:
        pass

    def on_command(self, command: prefill_pb2.PrefillCommand) -> None:
        self.unsent.append(prefill_pb2.PrefillEvent())


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("error", [None, RouterLostError("silent")])
async def test_a_stream_that_is_over_keeps_nothing(error: DiptychError | None) -> None:
    async def commands() -> AsyncIterator[Any]:
        yield prefill_pb2.PrefillCommand()
        await asyncio.sleep(0.01)
        if error is not None:
            await asyncio.sleep(60)

    async def serve() -> weakref.ref[Call]:
        call = Call()
        owner = Owner(call, commands())
        if error is not None:
            owner.stream.end(error)
            with pytest.raises(RouterLostError):
                await owner.stream.run(owner.on_command)
            error.__traceback__ = error.__context__ = None  # the test's own reference
        else:
            await owner.stream.run(owner.on_command)
        return weakref.ref(call)

    call = await serve()
    await asyncio.sleep(0)
    assert call() is None
