"""A router's stream over the real scheduler and pool: what it is told, and what is left of it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from decode_worker.outbox import NewToken
from decode_worker.stream import DecodeStream
from decode_worker.stream_resources import StreamDeps
from diptych.engine.protocol import StepListener
from diptych.engine.scheduling.step import SampledToken, StepOutput
from diptych.errors import InvalidRequestError, SlowClientError
from diptych.timers import Timers
from diptych.v1 import common_pb2, decode_pb2
from diptych.v1.decode_pb2 import DecodeCommand, DecodeEvent
from kvtransfer.reader.pull_machine import PullError, PullRequest, PullResult
from tests.unit.decode_worker.sequences_rig import Observer, Rig, reserve

HELLO = DecodeCommand(hello=decode_pb2.Hello(router_incarnation="router.1"))
RESERVE = DecodeCommand(reserve=reserve(1, 5))
BIND = DecodeCommand(bind=decode_pb2.Bind(sequence_id=1, bind_id=1))
START = DecodeCommand(start=decode_pb2.Start(sequence_id=1, compute_missing=True))
RELEASE = DecodeCommand(release=decode_pb2.Release(sequence_id=1))


class Pull:
    """Ends as the test says."""

    def __init__(self) -> None:
        self.end: asyncio.Future[PullResult] = asyncio.get_running_loop().create_future()

    async def run(self) -> PullResult:
        return await self.end

    def abandon(self) -> frozenset[int]:
        return frozenset()


class World:
    """A worker whose engine is there at once, or once ``attach`` is called; and one router."""

    def __init__(self, *, is_loaded: bool = True) -> None:
        self.rig = Rig()
        self.pulls: list[Pull] = []
        self.work_came: list[str] = []
        self.num_changes = 0
        self.listeners: list[StepListener] = []
        self._events: asyncio.Queue[DecodeEvent] = asyncio.Queue()
        self._commands: asyncio.Queue[DecodeCommand | None] = asyncio.Queue()
        self._is_loaded = is_loaded
        status: Any = SimpleNamespace(
            incarnation="worker.1",
            admit_as=lambda role: self.rig.admit(),
            work_came=self.work_came.append,
            load_changed=self._changed,
        )
        deps = StreamDeps(
            status=status, timers=Timers(), spans=cast(Any, None), max_unsent_events=64
        )
        context: Any = SimpleNamespace(peer=lambda: "ipv4:10.0.0.1:5", write=self._write)
        self.stream = DecodeStream(deps, self._said(), context, lambda *_: self._loaded())

    def attach(self) -> None:
        self._is_loaded = True
        self.stream.attach(self._resources())

    def say(self, *commands: DecodeCommand) -> None:
        for command in commands:
            self._commands.put_nowait(command)

    async def told(self) -> DecodeEvent:
        return await self._events.get()

    def step(self) -> None:
        """One of the engine, whose listeners hear of it."""
        plan = self.rig.scheduler.schedule()
        assert plan is not None
        drawn = tuple(SampledToken(3, float("nan")) if c.sample else None for c in plan.chunks)
        updates = self.rig.scheduler.update(plan, StepOutput(tokens=drawn, duration_s=0.0))
        for listener in self.listeners:
            listener(updates)

    async def serve(self) -> None:
        """Until the stream ends by itself."""
        async with asyncio.timeout(5):
            await self.stream.run()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """While the router is there: then nothing of it is left."""
        free = self.rig.pool.counts().free
        async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
            task = tasks.create_task(self.stream.run())
            yield
            self._commands.put_nowait(None)
            await task
        counts = self.rig.pool.counts()
        assert counts.free + counts.cached == free
        assert not self.listeners

    async def _said(self) -> AsyncIterator[DecodeCommand]:
        while (command := await self._commands.get()) is not None:
            yield command

    async def _write(self, event: DecodeEvent) -> None:
        self._events.put_nowait(event)

    def _changed(self) -> None:
        self.num_changes += 1

    def _loaded(self) -> Any:
        return self._resources() if self._is_loaded else None

    def _resources(self) -> Any:
        scheduler = self.rig.scheduler
        engine = SimpleNamespace(
            reserve=scheduler.reserve,
            start=scheduler.start,
            mark_proven=scheduler.mark_proven,
            release=scheduler.release,
            subscribe=self._subscribe,
        )
        pairs = SimpleNamespace(
            open_pull=self._open_pull,
            quarantined_block_ids=frozenset(),
            set_peers=lambda *_: None,
            leave=lambda _: None,
        )
        return SimpleNamespace(
            parts=SimpleNamespace(engine=engine, progress=common_pb2.EngineProgress),
            pairs=pairs,
            limits=self.rig.rules,
            engine_metrics=None,
            transfer_metrics=None,
        )

    def _subscribe(self, listener: StepListener) -> Callable[[], None]:
        self.listeners.append(listener)
        return lambda: self.listeners.remove(listener)

    def _open_pull(self, request: PullRequest) -> Pull:
        self.pulls.append(Pull())
        return self.pulls[-1]


class Booked(Observer):
    """Of a stream: how its pulls ended, and the tokens of its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.pulls: list[object] = []
        self.num_tokens = 0

    def pulling(self, sequence_id: int) -> int:
        return sequence_id

    def pulled(self, pulling: int, stats: common_pb2.TransferStats) -> None:
        self.pulls.append("proven")

    def pull_failed(self, pulling: int, error: PullError | None) -> None:
        self.pulls.append(None if error is None else error.failure)

    def stepped(self, tokens: Sequence[NewToken]) -> None:
        self.num_tokens += len(tokens)


@pytest.fixture
def booked(monkeypatch: pytest.MonkeyPatch) -> Booked:
    observer = Booked()
    monkeypatch.setattr("decode_worker.stream.StreamObserver", lambda *_: observer)
    return observer


pytestmark = pytest.mark.usefixtures("booked")


async def test_a_router_hears_who_answers_it_and_what_became_of_its_sequence(
    booked: Booked,
) -> None:
    """Others hear at once of what it reserves and starts, else theirs went there too."""
    world = World()
    async with world.serving():
        world.say(HELLO, RESERVE)
        assert (await world.told()).welcome.incarnation == "worker.1"
        assert (await world.told()).reserved.sequence_id == 1
        assert (world.work_came, world.stream.num_sequences) == (["router.1"], 1)
        world.say(START)
        while len(world.work_came) < 2:
            await asyncio.sleep(0)
        world.step()
        (tokens,) = (await world.told()).step.sequences
        assert (tokens.sequence_id, tokens.position, list(tokens.token_ids)) == (1, 5, [3])
        assert booked.num_tokens == 1
        world.say(RELEASE)
        assert (await world.told()).ended.sequence_id == 1
        assert (len(world.work_came), world.num_changes) == (2, 1)


async def test_a_stream_that_ends_frees_what_it_holds(booked: Booked) -> None:
    """A sequence that runs, and one that a pull was to bring; ``serving`` counts the blocks."""
    world = World()
    async with world.serving():
        world.say(HELLO, RESERVE, START, DecodeCommand(reserve=reserve(2, 6)))
        world.say(DecodeCommand(bind=decode_pb2.Bind(sequence_id=2, bind_id=1)))
        while not world.pulls:
            await asyncio.sleep(0)
        await asyncio.sleep(0)  # it begins
        assert world.stream.num_sequences == 2
    assert world.stream.num_sequences == 0
    assert booked.pulls == [None]
    assert world.pulls[0].end.cancelled()


@pytest.mark.parametrize(
    ("error", "failure", "says"),
    [
        (
            PullError(decode_pb2.PULL_FAILURE_UNPROVEN, "they differ"),
            decode_pb2.PULL_FAILURE_UNPROVEN,
            "they differ",
        ),
        (ValueError("a bug"), decode_pb2.PULL_FAILURE_TRANSPORT, "internal: ValueError('a bug')"),
    ],
    ids=["of the pull", "a bug"],
)
async def test_a_pull_that_fails_is_told_and_booked_and_another_may_follow(
    booked: Booked, error: Exception, failure: decode_pb2.PullFailure, says: str
) -> None:
    world = World()
    async with world.serving():
        world.say(HELLO, RESERVE, BIND)
        while not world.pulls:
            await asyncio.sleep(0)
        world.pulls[0].end.set_exception(error)
        for _ in range(2):
            await world.told()  # that it is welcome, and that blocks are held
        told = (await world.told()).pull_failed
        assert (told.sequence_id, told.bind_id, told.reason, told.message) == (1, 1, failure, says)
        world.say(DecodeCommand(bind=decode_pb2.Bind(sequence_id=1, bind_id=2)))
        while len(world.pulls) < 2:
            await asyncio.sleep(0)
        world.pulls[1].end.set_result(PullResult(stats=common_pb2.TransferStats(num_bytes=9)))
        proven = (await world.told()).proven
        assert (proven.bind_id, proven.stats.num_bytes) == (2, 9)
        assert booked.pulls == [failure, "proven"]


async def test_a_pull_that_nobody_wants_any_more_is_ended_and_no_failure(booked: Booked) -> None:
    world = World()
    async with world.serving():
        world.say(HELLO, RESERVE, BIND)
        while not world.pulls:
            await asyncio.sleep(0)
        await asyncio.sleep(0)  # it begins
        world.say(RELEASE)
        kinds = [(await world.told()).WhichOneof("event") for _ in range(3)]
        assert kinds == ["welcome", "reserved", "ended"]
        while not world.pulls[0].end.cancelled():
            await asyncio.sleep(0)
        assert booked.pulls == [None]


async def test_before_the_engine_is_there_a_sequence_is_refused_and_afterwards_taken() -> None:
    world = World(is_loaded=False)
    async with world.serving():
        world.say(HELLO, RESERVE)
        await world.told()
        ended = (await world.told()).ended
        assert (ended.sequence_id, ended.failure.reason) == (1, "NO_WORKER")
        world.attach()
        world.say(RESERVE)
        assert (await world.told()).reserved.sequence_id == 1


@pytest.mark.parametrize(
    "commands",
    [
        (RESERVE,),
        (DecodeCommand(hello=decode_pb2.Hello()),),
        (HELLO, HELLO),
        (HELLO, RESERVE, RESERVE),
    ],
    ids=["no hello", "of nobody", "two", "an id in use"],
)
async def test_what_is_out_of_order_ends_the_stream(commands: tuple[DecodeCommand, ...]) -> None:
    world = World()
    world.say(*commands)
    with pytest.raises(InvalidRequestError):
        await world.serve()
    assert world.stream.num_sequences == 0
    assert world.rig.pool.counts().reserved == 0


async def test_a_router_that_takes_nothing_loses_its_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it has not heard of is bounded."""
    world = World()
    monkeypatch.setattr(world.stream._outbox, "_max_events", 2)
    world.say(HELLO, *(DecodeCommand(reserve=reserve(n, 2)) for n in range(1, 4)))
    with pytest.raises(SlowClientError):
        await world.serve()
    assert world.rig.pool.counts().reserved == 0
