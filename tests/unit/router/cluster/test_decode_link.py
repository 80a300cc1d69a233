"""When the router opens its stream to a decode worker, and what it says first. No sockets."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator
from typing import cast

import grpc
import pytest

from diptych.timers import Timers
from diptych.v1 import common_pb2, decode_pb2, decode_pb2_grpc, worker_pb2
from router.cluster.decode_link import DecodeLink
from router.cluster.watch import WorkerWatch
from router.placement.views import WorkerId
from tests.unit.router.cluster.last_words import LastWords


class FakeCall:
    """Answers Hello with Welcome, keeps what was sent, ends when cancelled."""

    def __init__(self, commands: AsyncIterator[decode_pb2.DecodeCommand]) -> None:
        self._commands = commands
        self.sent: list[decode_pb2.DecodeCommand] = []
        self.peers_came = asyncio.Event()
        self._ended = False

    def end(self) -> None:
        """As the worker does."""
        self._ended = True

    async def __aiter__(self) -> AsyncIterator[decode_pb2.DecodeEvent]:
        async for command in self._commands:
            if self._ended:
                return
            self.sent.append(command)
            if command.HasField("hello"):
                yield decode_pb2.DecodeEvent(welcome=decode_pb2.Welcome(incarnation="d1"))
            if command.HasField("peers"):
                self.peers_came.set()

    def add_done_callback(self, callback: object) -> None: ...

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
        role = worker_pb2.WORKER_ROLE_DECODE
        self.state = None if state is None else worker_pb2.WorkerState(state=state, role=role)

    is_alive = WorkerWatch.is_alive
    can_decode = WorkerWatch.can_decode


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[FakeCall]:
    FakeStub.calls = []
    monkeypatch.setattr(decode_pb2_grpc, "DecodeStub", FakeStub)
    return FakeStub.calls


def link_to(state: worker_pb2.ServingState | None) -> DecodeLink:
    return DecodeLink(
        cast(WorkerWatch, FakeWatch(state)),
        router_incarnation="r1",
        timers=Timers(),
        on_change=lambda link: None,
    )


async def up(link: DecodeLink) -> None:
    """Wait until the stream is up."""
    async with asyncio.timeout(5):
        while link.worker is None:
            await asyncio.sleep(0)


async def test_a_worker_that_waits_for_a_pair_is_told_of_its_peers(calls: list[FakeCall]) -> None:
    link = link_to(worker_pb2.SERVING_STATE_STARTING)
    link.set_peers((WorkerId("prefill:1", "p1"),))
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(link.run(), name="link")
        async with asyncio.timeout(5):
            while not calls:
                await asyncio.sleep(0)
            await calls[0].peers_came.wait()
        running.cancel()
    (peer,) = next(c.peers.peers for c in calls[0].sent if c.HasField("peers"))
    assert (peer.address, peer.incarnation) == ("prefill:1", "p1")


async def test_a_worker_is_told_of_peers_that_come_and_go_while_its_stream_is_open(
    calls: list[FakeCall],
) -> None:
    """A pair with one that it does not know of would never be proven."""
    link = link_to(worker_pb2.SERVING_STATE_READY)
    wanted = [(), (WorkerId("prefill:1", "p1"),), (WorkerId("prefill:2", "p2"),)]
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(link.run(), name="link")
        await up(link)
        for peers in wanted[1:]:
            link.set_peers(peers)
            link.set_peers(peers)  # no news
            calls[0].peers_came.clear()
            async with asyncio.timeout(5):
                await calls[0].peers_came.wait()
        running.cancel()
    told = [command.peers.peers for command in calls[0].sent if command.HasField("peers")]
    said = [tuple(WorkerId(peer.address, peer.incarnation) for peer in peers) for peers in told]
    assert said == wanted


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


async def test_a_router_that_ends_its_stream_itself_logs_no_loss(
    calls: list[FakeCall], caplog: pytest.LogCaptureFixture
) -> None:
    link, listener = link_to(worker_pb2.SERVING_STATE_READY), LastWords()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(link.run(), name="link")
        await up(link)
        assert link.reserve(decode_pb2.Reserve(sequence_id=3), listener)
        with caplog.at_level(logging.INFO):
            running.cancel()
    assert listener.lost == [(3, "the router left it")]
    assert not caplog.records
    assert link.worker is None


async def test_a_stream_that_the_worker_ends_is_lost_and_told_once(
    calls: list[FakeCall], caplog: pytest.LogCaptureFixture
) -> None:
    link, listener = link_to(worker_pb2.SERVING_STATE_READY), LastWords()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(link.run(), name="link")
        await up(link)
        assert link.reserve(decode_pb2.Reserve(sequence_id=3), listener)
        calls[0].end()
        async with asyncio.timeout(5):
            while not listener.lost:
                await asyncio.sleep(0)
        running.cancel()
    assert listener.lost == [(3, "it ended the stream")]
    assert [record.message for record in caplog.records] == ["decode stream lost"]


FOUND = common_pb2.TokenLogprobs(logprob=-1, top_token_ids=[5], top_logprobs=[-1])
NO_NUMBER = common_pb2.TokenLogprobs(logprob=math.nan)
UNEVEN = common_pb2.TokenLogprobs(logprob=-1, top_token_ids=[5, 6], top_logprobs=[-1])


def step(*logprobs: common_pb2.TokenLogprobs) -> decode_pb2.DecodeEvent:
    """Two tokens of a sequence."""
    tokens = decode_pb2.SequenceTokens(
        sequence_id=1, position=3, token_ids=[5, 6], logprobs=logprobs
    )
    return decode_pb2.DecodeEvent(step=decode_pb2.StepTokens(sequences=[tokens]))


def marked(*margins: float) -> decode_pb2.DecodeEvent:
    """Two tokens of a sequence, and how sure they were."""
    said = step()
    said.step.sequences[0].margins.extend(margins)
    return said


def pulled(seconds: float) -> decode_pb2.DecodeEvent:
    stats = common_pb2.TransferStats(total_s=1.0, exposed_s=seconds)
    return decode_pb2.DecodeEvent(proven=decode_pb2.Proven(sequence_id=1, stats=stats))


@pytest.mark.parametrize(
    "said",
    [
        step(FOUND),
        step(FOUND, FOUND, FOUND),
        step(FOUND, NO_NUMBER),
        step(UNEVEN, FOUND),
        marked(1.0),
        marked(1.0, math.nan),
        pulled(math.nan),
        pulled(math.inf),
        pulled(-math.inf),
    ],
)
def test_what_nobody_could_tell_on_ends_the_reservation(said: decode_pb2.DecodeEvent) -> None:
    link, heard = link_to(None), LastWords()
    link._handle(decode_pb2.DecodeEvent(welcome=decode_pb2.Welcome(incarnation="d1")))
    assert link.reserve(decode_pb2.Reserve(sequence_id=1), heard)
    link._handle(said)
    assert [sequence_id for sequence_id, _ in heard.lost] == [1]
    assert link.load.num_own == 0
    link._handle(said)
    assert len(heard.lost) == 1, "nothing is heard of it any more"


@pytest.mark.parametrize("said", [step(), step(FOUND, FOUND), marked(0.0, math.inf), pulled(0.0)])
def test_what_can_be_told_on_is(said: decode_pb2.DecodeEvent) -> None:
    link, heard = link_to(None), LastWords()
    link._handle(decode_pb2.DecodeEvent(welcome=decode_pb2.Welcome(incarnation="d1")))
    assert link.reserve(decode_pb2.Reserve(sequence_id=1), heard)
    with pytest.raises(AssertionError):  # as whoever listens would say other words
        link._handle(said)
    assert not heard.lost
