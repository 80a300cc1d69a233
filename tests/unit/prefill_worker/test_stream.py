"""A lease's stream on a worker of both roles whose blocks a batch holds."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from diptych.engine.protocol import StepListener
from diptych.engine.scheduling.block_pool import BlockCounts
from diptych.engine.scheduling.scheduler import Scheduler
from diptych.engine.scheduling.sequence import SequenceState
from diptych.engine.scheduling.step import SequenceUpdate
from diptych.errors import (
    BlocksExhaustedError,
    DiptychError,
    StepFailedError,
    WorkerDrainingError,
)
from diptych.timers import Timers
from diptych.v1 import common_pb2, prefill_pb2
from kvtransfer.source.lease_table import LeaseTable
from prefill_worker.stream import LeaseStream
from prefill_worker.stream_resources import StreamDeps, StreamResources
from tests.unit.engine.scheduling.steps import make_scheduler, make_sequence, start_local, step

NOTHING = cast(Any, SimpleNamespace())


class AtWork:
    """An engine whose scheduler has a step in flight; who listens is told of its end."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.add_prefill, self.release = scheduler.add_prefill, scheduler.release
        self.listeners: list[StepListener] = []
        self._scheduler = scheduler
        self._plan = scheduler.schedule()

    def subscribe(self, listener: StepListener) -> Callable[[], None]:
        self.listeners.append(listener)
        return lambda: self.listeners.remove(listener) if listener in self.listeners else None

    def end_step(self) -> None:
        updates: list[SequenceUpdate] = []
        if self._plan is not None:
            updates = self._scheduler.fail(self._plan, StepFailedError("it is over"))
            self._plan = None
        for listener in tuple(self.listeners):
            listener(updates)


class Rig:
    """A batch decodes, in 14 of 16 blocks; and the stream of a prompt that needs five."""

    def __init__(self) -> None:
        self.scheduler = make_scheduler(16)
        self.of_batch = make_sequence([1] * 50)
        self.of_batch.yields = True
        start_local(self.scheduler, self.of_batch)
        step(self.scheduler)
        self.engine = AtWork(self.scheduler)
        self.errors: list[DiptychError] = []
        self.refuses: DiptychError | None = None
        status = SimpleNamespace(
            admit_as=self._admit_as, incarnation="worker.1", work_came=lambda router: None
        )
        deps = StreamDeps(status=cast(Any, status), timers=Timers(), spans=NOTHING)
        context = cast(Any, SimpleNamespace(invocation_metadata=lambda: ()))
        self.stream = LeaseStream(deps, NOTHING, context, lambda key, stream: None)
        self.stream._stream = cast(Any, SimpleNamespace(end=self.errors.append, wake=lambda: None))
        parts = SimpleNamespace(engine=self.engine, vocab_size=100, max_model_len=60)
        leases = LeaseTable(4, self.scheduler.pool.generation)
        self.stream.attach(StreamResources(parts=cast(Any, parts), leases=leases, metrics=NOTHING))

    def _admit_as(self, role: object) -> None:
        if self.refuses is not None:
            raise self.refuses

    def start(self, num_tokens: int = 20) -> None:
        spec = common_pb2.SequenceSpec(
            token_ids=[2] * num_tokens,
            num_prompt_tokens=num_tokens,
            sampling=common_pb2.SamplingParams(temperature=0, seed=1, max_tokens=4),
        )
        start = prefill_pb2.PrefillStart(router_incarnation="router.1", sequence_id=7, spec=spec)
        self.stream._on_command(prefill_pb2.PrefillCommand(start=start))

    def said(self) -> list[prefill_pb2.PrefillEvent]:
        events = list(self.stream._unsent)
        self.stream._unsent.clear()
        return cast(list[prefill_pb2.PrefillEvent], events)

    @property
    def counts(self) -> BlockCounts:
        return self.scheduler.pool.counts()


async def test_a_lease_is_accepted_when_a_batch_has_left_its_blocks() -> None:
    rig = Rig()
    rig.start()
    assert not rig.said()
    rig.engine.end_step()
    (event,) = rig.said()
    assert event.accepted.incarnation == "worker.1"
    assert rig.counts.running == 5
    assert not rig.engine.listeners
    assert not rig.errors
    rig.engine.end_step()
    assert not rig.said()


async def test_whose_stream_ends_meanwhile_gets_none() -> None:
    rig = Rig()
    rig.start()
    rig.stream._close("cancelled")
    assert not rig.engine.listeners
    rig.engine.end_step()
    assert not rig.said()
    assert rig.counts.running == 0


async def test_a_worker_that_drains_meanwhile_refuses_it() -> None:
    rig = Rig()
    rig.start()
    rig.refuses = WorkerDrainingError("the worker shuts down")
    rig.engine.end_step()
    assert rig.errors == [rig.refuses]
    assert not rig.said()
    assert not rig.engine.listeners


async def test_where_a_batch_holds_too_few_blocks_it_is_refused_at_once() -> None:
    rig = Rig()
    rig.of_batch.has_aged = True
    with pytest.raises(BlocksExhaustedError):
        rig.start()
    assert rig.of_batch.state is SequenceState.RUNNING
    assert not rig.engine.listeners
