"""Which stream a lease's key is of, from its start to the end of its stream."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from diptych.engine.scheduling.sequence import SequenceKey
from diptych.engine.scheduling.step import SequenceUpdate
from diptych.errors import (
    DiptychError,
    InvalidRequestError,
    StepFailedError,
    WorkerDrainingError,
)
from diptych.timers import Timers
from prefill_worker.servicer import PrefillServicer
from prefill_worker.stream import LeaseStream
from prefill_worker.stream_resources import StreamDeps

KEY = SequenceKey("router.1", 7)


class Stream:
    """A LeaseStream that starts its lease and runs until it is told to end."""

    def __init__(self, servicer: PrefillServicer) -> None:
        self.key: SequenceKey | None = None
        self.errors: list[DiptychError] = []
        self._servicer = servicer
        self._ended = asyncio.Event()

    async def run(self) -> None:
        self._servicer._on_start(KEY, cast(LeaseStream, self))
        self.key = KEY
        await self._ended.wait()
        raise self.errors[0]

    def end(self, error: DiptychError) -> None:
        self.errors.append(error)
        self._ended.set()


def make_servicer() -> PrefillServicer:
    nothing = cast(Any, SimpleNamespace())
    return PrefillServicer(StreamDeps(status=nothing, timers=Timers(), spans=nothing))


async def serve(servicer: PrefillServicer, stream: Stream) -> None:
    with pytest.raises(WorkerDrainingError):
        await servicer._run(cast(LeaseStream, stream))


async def test_an_id_in_use_is_refused_and_stays_its_first_streams() -> None:
    servicer = make_servicer()
    first, second = Stream(servicer), Stream(servicer)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(serve(servicer, first))
        await asyncio.sleep(0)
        assert servicer.num_leases == 1
        with pytest.raises(InvalidRequestError, match="7 is in use"):
            await servicer._run(cast(LeaseStream, second))
        assert servicer.num_leases == 1
        servicer.end_all(WorkerDrainingError("the worker shuts down"))
    assert servicer.num_leases == 0
    assert not second.errors


async def test_a_failed_step_of_its_sequence_ends_a_stream() -> None:
    """Else its router waits for a token that nobody draws."""
    nothing = cast(Any, SimpleNamespace())
    deps = StreamDeps(status=nothing, timers=Timers(), spans=nothing)
    stream = LeaseStream(deps, nothing, nothing, lambda key, stream: None)
    errors: list[DiptychError] = []
    stream._stream = cast(Any, SimpleNamespace(end=errors.append))
    stream._session = stream._resources = nothing
    error = StepFailedError("a step failed")
    stream.on_update(SequenceUpdate(nothing, 0, 0, None, None, None, error))
    assert errors == [error]
