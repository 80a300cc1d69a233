"""When the router opens its stream to a decode worker, and what it says first. No sockets."""

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import grpc
import pytest

from diptych.timers import Timers
from diptych.v1 import decode_pb2, decode_pb2_grpc, worker_pb2
from router.cluster import decode_link
from router.cluster.decode_link import DecodeLink
from router.cluster.watch import WorkerWatch
from router.placement.types import WorkerId


class FakeCall:
    """Answers Hello with Welcome, keeps what was sent, ends when cancelled."""

    def __init__(self, commands: AsyncIterator[decode_pb2.DecodeCommand]) -> None:
        self._commands = commands
        self.sent: list[decode_pb2.DecodeCommand] = []
        self.peers_came = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[decode_pb2.DecodeEvent]:
        async for command in self._commands:
            self.sent.append(command)
            if command.HasField("hello"):
                yield decode_pb2.DecodeEvent(welcome=decode_pb2.Welcome(incarnation="d1"))
            if command.HasField("peers"):
                self.peers_came.set()

    def cancel(self) -> bool:
        return True


class FakeStub:
    calls: list[FakeCall]

    def __init__(self, channel: grpc.aio.Channel) -> None:
        pass

    def Decode(self, commands: AsyncIterator[decode_pb2.DecodeCommand]) -> FakeCall:
        call = FakeCall(commands)
        self.calls.append(call)
        return call


class FakeWatch:
    """A worker in the state that a test says."""

    address = "decode:1"
    channel = None

    def __init__(self, state: worker_pb2.ServingState | None) -> None:
        self.state = None if state is None else worker_pb2.WorkerState(state=state)

    is_alive = WorkerWatch.is_alive


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[FakeCall]:
    FakeStub.calls = []
    monkeypatch.setattr(decode_pb2_grpc, "DecodeStub", FakeStub)
    monkeypatch.setattr(decode_link, "_NOT_THERE_POLL_S", 0.0)
    return FakeStub.calls


def link_to(state: worker_pb2.ServingState | None) -> DecodeLink:
    return DecodeLink(
        cast(WorkerWatch, FakeWatch(state)),
        router_incarnation="r1",
        timers=Timers(),
        on_change=lambda: None,
    )


async def test_a_worker_that_waits_for_a_pair_is_told_of_its_peers(calls: list[FakeCall]) -> None:
    link = link_to(worker_pb2.SERVING_STATE_STARTING)
    link.set_peers([WorkerId("prefill:1", "p1")])
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(link.run(), name="link")
        async with asyncio.timeout(5):
            while not calls:
                await asyncio.sleep(0)
            await calls[0].peers_came.wait()
        running.cancel()
    (peer,) = next(c.peers.peers for c in calls[0].sent if c.HasField("peers"))
    assert (peer.address, peer.incarnation) == ("prefill:1", "p1")


@pytest.mark.parametrize("state", [None, worker_pb2.SERVING_STATE_FAILED])
async def test_a_worker_that_is_gone_or_failed_is_left_alone(
    calls: list[FakeCall], state: worker_pb2.ServingState | None
) -> None:
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(link_to(state).run(), name="link")
        for _ in range(20):
            await asyncio.sleep(0)
        running.cancel()
    assert not calls
