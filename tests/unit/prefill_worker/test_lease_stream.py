"""A lease's stream over the real scheduler and pool: what is told, and what is left of it."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from diptych.engine.scheduling.step import SampledToken, StepOutput
from diptych.errors import (
    DiptychError,
    InvalidRequestError,
    LeaseExpiredError,
    RouterLostError,
    WorkerDrainingError,
)
from diptych.telemetry.stages import Stage
from diptych.timers import Timers
from diptych.v1.prefill_pb2 import PrefillCommand, PrefillEvent
from prefill_worker.stream import LeaseStream
from prefill_worker.stream_resources import StreamDeps, StreamResources
from tests.unit.prefill_worker.test_lease_session import MAX_LEN, NUM_BLOCKS, VOCAB, Rig
from tests.unit.prefill_worker.test_lease_session import grant as granted
from tests.unit.prefill_worker.test_lease_session import start as started

START = PrefillCommand(start=started(1, 9))
GRANT = PrefillCommand(grant=granted(1))
AT_ONCE, LATE = Timers(unbound_lease_s=1e-9), Timers(unbound_lease_s=1000.0)


class Booked:
    """In the place of metrics and spans."""

    def __init__(self) -> None:
        self.ended: Counter[str] = Counter()
        self.num_held = 0
        self.stages: dict[Stage, str | None] = {}
        """With the error of each."""

    @property
    def metrics(self) -> Any:
        def counter(why: str) -> Any:
            return SimpleNamespace(inc=lambda: self.ended.update([why]))

        class Ended(defaultdict[str, Any]):
            def __missing__(self, why: str) -> Any:
                return counter(why)

        return SimpleNamespace(ended=Ended(), held_seconds=SimpleNamespace(observe=self._held))

    def record(
        self, stage: Stage, parent: object, begin_s: float, end_s: float, *, error: str | None
    ) -> None:
        assert begin_s <= end_s
        self.stages[stage] = error

    def _held(self, held_s: float) -> None:
        assert held_s >= 0
        self.num_held += 1


class World:
    """A worker with an engine, and the stream of one lease."""

    def __init__(self, timers: Timers = LATE) -> None:
        self.rig = Rig()
        self.booked = Booked()
        self.work_came: list[str] = []
        self.refuses: DiptychError | None = None
        self._commands: asyncio.Queue[PrefillCommand | None] = asyncio.Queue()
        self._events: asyncio.Queue[PrefillEvent] = asyncio.Queue()
        status: Any = SimpleNamespace(
            incarnation="worker.1", admit_as=self._admit, work_came=self.work_came.append
        )
        spans: Any = self.booked
        context: Any = SimpleNamespace(invocation_metadata=lambda: (), write=self._write)
        deps = StreamDeps(status=status, timers=timers, spans=spans)
        self.stream = LeaseStream(deps, self._said(), context, lambda key, stream: None)
        engine = SimpleNamespace(
            add_prefill=self.rig.scheduler.add_prefill,
            release=self.rig.scheduler.release,
            last_step=None,
        )
        parts: Any = SimpleNamespace(engine=engine, vocab_size=VOCAB, max_model_len=MAX_LEN)
        metrics = self.booked.metrics
        self.stream.attach(StreamResources(parts=parts, leases=self.rig.leases, metrics=metrics))

    def say(self, *commands: PrefillCommand | None) -> None:
        """None: it half-closes."""
        for command in commands:
            self._commands.put_nowait(command)

    async def told(self) -> PrefillEvent:
        return await self._events.get()

    def step(self) -> None:
        """All that can be computed, in steps whose ends the stream hears of."""
        while (plan := self.rig.scheduler.schedule()) is not None:
            drawn = tuple(SampledToken(1, 0.5) if chunk.sample else None for chunk in plan.chunks)
            output = StepOutput(tokens=drawn, duration_s=0.0)
            for update in self.rig.scheduler.update(plan, output):
                self.stream.on_update(update)

    async def serve(self, meanwhile: Callable[[], Any]) -> None:
        """Until the stream ends. Raises why; nothing is held then."""
        async with asyncio.timeout(5):
            task = asyncio.ensure_future(self.stream.run())  # noqa: TID251 - awaited below
            try:
                await meanwhile()
                await task
            finally:
                task.cancel()
                with suppress(asyncio.CancelledError, DiptychError):
                    await task
        counts = self.rig.pool.counts()
        assert counts.free + counts.cached == NUM_BLOCKS

    async def accepted(self) -> None:
        self.say(START)
        assert (await self.told()).accepted.incarnation == "worker.1"

    async def computed(self) -> None:
        await self.accepted()
        self.step()
        assert (await self.told()).first_token.position == 9

    async def _said(self) -> AsyncIterator[PrefillCommand]:
        while (command := await self._commands.get()) is not None:
            yield command

    async def _write(self, event: PrefillEvent) -> None:
        self._events.put_nowait(event)

    def _admit(self, role: object) -> None:
        if self.refuses is not None:
            raise self.refuses


async def test_a_lease_is_accepted_granted_and_computed_and_freed_at_its_end() -> None:
    """Other routers hear at once that it came, else theirs went there too."""
    world = World(AT_ONCE)

    async def meanwhile() -> None:
        await world.accepted()
        assert world.work_came == ["r"]
        world.say(GRANT)
        assert (await world.told()).granted.grant_id == 1
        world.step()
        assert (await world.told()).first_token.position == 9
        for _ in range(9):  # whose reader is granted stays
            await asyncio.sleep(0)
        assert world.rig.pool.counts().leased == 3
        world.say(None)

    await world.serve(meanwhile)
    assert (world.booked.ended, world.booked.num_held) == ({"released": 1}, 1)
    assert world.booked.stages == {Stage.PREFILL_WAIT: None, Stage.PREFILL_COMPUTE: None}


async def test_a_lease_that_is_computed_and_granted_to_nobody_expires() -> None:
    """A router that forgot it would keep its blocks from all others."""
    world = World(AT_ONCE)
    with pytest.raises(LeaseExpiredError, match="granted to nobody"):
        await world.serve(world.computed)
    assert world.booked.ended == {"expired": 1}


async def test_one_that_was_granted_before_its_time_was_over_stays() -> None:
    world = World()

    async def meanwhile() -> None:
        await world.computed()
        world.say(GRANT)
        assert (await world.told()).granted.grant_id == 1
        world.stream._expire()  # the time is over
        world.say(None)

    await world.serve(meanwhile)
    assert world.booked.ended == {"released": 1}


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (WorkerDrainingError("the worker shuts down"), "drained"),
        (RouterLostError("no sign of it"), "lost_router"),
        (InvalidRequestError("another", field="x"), "failed"),
    ],
)
async def test_a_lease_that_ends_before_it_is_computed_says_why(
    error: DiptychError, why: str
) -> None:
    world = World()

    async def meanwhile() -> None:
        await world.accepted()
        world.stream.end(error)

    with pytest.raises(type(error)):
        await world.serve(meanwhile)
    assert (world.booked.ended, world.booked.num_held) == ({why: 1}, 1)
    assert world.booked.stages == {Stage.PREFILL_WAIT: why}, "nothing was computed"


async def test_one_whose_call_is_cancelled_frees_its_blocks() -> None:
    world = World()

    async def meanwhile() -> None:
        await world.accepted()
        raise ConnectionError

    with pytest.raises(ConnectionError):
        await world.serve(meanwhile)
    assert world.booked.ended == {"cancelled": 1}
    assert world.rig.pool.counts().leased == 0


@pytest.mark.parametrize(
    ("commands", "says"),
    [((GRANT,), "grant: came before start"), ((START, START), "start: came twice")],
)
async def test_what_is_out_of_order_ends_the_stream(
    commands: tuple[PrefillCommand, ...], says: str
) -> None:
    world = World()
    world.say(*commands)
    with pytest.raises(InvalidRequestError, match=says):
        await world.serve(lambda: asyncio.sleep(0))


async def test_a_worker_that_takes_nothing_opens_no_lease_and_counts_none() -> None:
    world = World()
    world.refuses = WorkerDrainingError("the worker shuts down")
    world.say(START)
    with pytest.raises(WorkerDrainingError):
        await world.serve(lambda: asyncio.sleep(0))
    assert world.stream.key is None
    assert not world.booked.ended
    assert not world.booked.stages


async def test_what_a_newer_router_says_is_passed_over() -> None:
    world = World()

    async def meanwhile() -> None:
        await world.accepted()
        world.say(PrefillCommand(), GRANT)
        assert (await world.told()).granted.grant_id == 1
        world.say(None)

    await world.serve(meanwhile)
