"""A worker hears the words on its traces, and its clock is known within half a round trip."""

import asyncio
import time
from collections.abc import Callable
from typing import Any, cast

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from diptych.rpc.server import Context
from diptych.telemetry import tracing
from diptych.telemetry.stages import Stage
from diptych.telemetry.tracing import Tracing
from diptych.v1 import worker_pb2, worker_pb2_grpc
from diptych.worker.status import WatchServicer, WorkerStatus
from router.cluster import trace_link
from router.cluster.trace_link import TraceLink
from router.cluster.worker_clock import ClockOffset, WorkerClock
from router.placement.types import WorkerId

seconds = st.integers(0, 10**6)
SKEW_S = 3600.0
HOLD = 0xABC


@given(skew_s=st.integers(-(10**6), 10**6), trips=st.lists(st.tuples(seconds, seconds), min_size=1))
def test_the_truth_lies_within_the_uncertainty(skew_s: int, trips: list[tuple[int, int]]) -> None:
    clock, now_s = WorkerClock(), 0.0
    for there_s, back_s in trips:
        clock.told(now_s, now_s + there_s + skew_s, now_s + there_s + back_s)
        now_s += there_s + back_s + 1.0
    offset = clock.offset
    assert offset is not None
    assert abs(offset.offset_s - skew_s) <= offset.uncertainty_s
    assert offset.uncertainty_s == min((a + b) / 2 for a, b in trips[-8:])


def test_a_clock_that_was_set_is_followed() -> None:
    clock = WorkerClock()
    clock.told(0.0, 0.001, 0.002)
    for at_s in range(1, 9):
        clock.told(at_s, at_s + 50.0, at_s + 1.0)
    assert clock.offset == ClockOffset(49.5, 0.5)
    clock.forget()
    assert clock.offset is None


class FakeWatch:
    """Of a worker of ours, whose clock is ahead by SKEW_S; ``fails`` is what its calls end with."""

    def __init__(self) -> None:
        self.worker: WorkerId | None = WorkerId("w:1", "i1")
        self.channel = None
        self.exporter = InMemorySpanExporter()
        self.fails: Exception | None = None
        self.num_calls = 0
        self.spans = Tracing(
            "worker",
            exporter=self.exporter,
            wall_ns=lambda: time.time_ns() + round(SKEW_S * 1e9),
        )
        status = WorkerStatus(worker_pb2.WORKER_ROLE_DECODE)
        self._servicer = WatchServicer(status, self.spans)

    async def EndTraces(
        self,
        request: worker_pb2.EndTracesRequest,
        timeout: float,  # noqa: ASYNC109 - as gRPC's stubs have it
    ) -> worker_pb2.EndTracesResponse:
        self.num_calls += 1
        if self.fails is not None:
            raise self.fails
        return await self._servicer.EndTraces(request, cast(Context, None))

    def sent(self) -> list[str]:
        self.spans.shutdown()
        return [span.name for span in self.exporter.get_finished_spans()]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> FakeWatch:
    made = FakeWatch()
    monkeypatch.setattr(worker_pb2_grpc, "WorkerStub", lambda channel: made)
    monkeypatch.setattr(trace_link, "_REST_S", 0.0)
    return made


async def ask(watch: FakeWatch, link: TraceLink, until: Callable[[], bool]) -> None:
    """Run the link until it is so."""
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(link.run())
        while not until():
            await asyncio.sleep(0)
        running.cancel()


def link_to(watch: FakeWatch) -> TraceLink:
    return TraceLink(cast(Any, watch), Tracing("router").now_s)


async def test_a_skewed_clock_is_known_as_soon_as_the_worker_is_there(watch: FakeWatch) -> None:
    link = link_to(watch)
    assert link.clock_offset is None
    link.worker_changed()
    await ask(watch, link, lambda: link.clock_offset is not None)
    offset = link.clock_offset
    assert offset is not None
    assert abs(offset.offset_s - SKEW_S) < 60.0  # each process looked at two clocks, at its leisure
    watch.worker = WorkerId("w:1", "i2")
    assert link.clock_offset is None, "of another process nothing is known yet"


async def test_the_worker_sends_what_is_kept_and_drops_the_rest(watch: FakeWatch) -> None:
    held = {
        hold: tracing.extract_map(
            {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": f"diptych={hold:016x}"}
        )
        for hold in (HOLD, HOLD + 1)
    }
    watch.spans.record(Stage.DECODE_RUN, held[HOLD], 0.0, 1.0)
    watch.spans.record(Stage.TRANSFER, held[HOLD + 1], 0.0, 1.0)
    assert watch.spans.num_held == 2
    link = link_to(watch)
    link.tell(HOLD, keep=True)
    link.tell(HOLD + 1, keep=False)
    await ask(watch, link, lambda: watch.spans.num_held == 0)
    assert watch.num_calls == 1, "they went together"
    assert watch.sent() == ["diptych.decode_run"]


@pytest.mark.parametrize("is_there", [True, False])
async def test_words_are_lost_with_the_worker(watch: FakeWatch, is_there: bool) -> None:
    link = link_to(watch)
    if is_there:
        watch.fails = grpc.aio.UsageError("closed")
    else:
        watch.worker = None
    link.tell(HOLD, keep=True)
    await ask(watch, link, lambda: not link._words)
    assert watch.num_calls == int(is_there)
    assert link.clock_offset is None
