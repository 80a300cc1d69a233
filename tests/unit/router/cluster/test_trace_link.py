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
from router.cluster.watch import WorkerWatch
from router.cluster.worker_clock import ClockOffset, WorkerClock
from router.placement.views import WorkerId
from tests.unit.router.cluster.world import FakeChannel, World

seconds = st.integers(0, 10**6)
SKEW_S = 3600.0
HOLD = 0xABC
WORKER = WorkerId("w:1", "i1")


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
        self.worker: WorkerId | None = WORKER
        self.channel = None
        self.exporter = InMemorySpanExporter()
        self.fails: Exception | None = None
        self.hangs = False
        self.on_call: Callable[[], None] = lambda: None
        self.num_calls = 0
        self.kept: list[int] = []
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
        self.on_call()
        if self.hangs:
            await asyncio.Event().wait()
        if self.fails is not None:
            raise self.fails
        self.kept += request.keep
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
    link.tell(WORKER, HOLD, keep=True)
    link.tell(WORKER, HOLD + 1, keep=False)
    await ask(watch, link, lambda: watch.spans.num_held == 0)
    assert watch.num_calls == 1, "they went together"
    assert watch.sent() == ["diptych.decode_run"]


def failure(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "", "")


@pytest.mark.parametrize(
    "fails",
    [
        failure(grpc.StatusCode.UNAVAILABLE),
        failure(grpc.StatusCode.DEADLINE_EXCEEDED),
        grpc.aio.UsageError("closed"),
    ],
)
async def test_what_was_not_heard_is_said_again(watch: FakeWatch, fails: Exception) -> None:
    link, watch.fails = link_to(watch), fails
    link.tell(WORKER, HOLD, keep=True)
    await ask(watch, link, lambda: watch.num_calls == 3)
    watch.fails = None
    link.tell(WORKER, HOLD + 1, keep=True)
    await ask(watch, link, lambda: not link._words and watch.num_calls == 4)
    assert watch.kept == [HOLD, HOLD + 1]


async def test_a_worker_of_a_version_without_is_told_once(watch: FakeWatch) -> None:
    link, watch.fails = link_to(watch), failure(grpc.StatusCode.UNIMPLEMENTED)
    link.tell(WORKER, HOLD, keep=True)
    await ask(watch, link, lambda: watch.num_calls == 1 and not link._words)


async def test_words_wait_for_a_process_that_is_not_seen_for_a_while(watch: FakeWatch) -> None:
    link, watch.worker = link_to(watch), None
    link.tell(WORKER, HOLD, keep=True)
    await ask(watch, link, lambda: not link._is_due.is_set())
    assert (watch.num_calls, link.clock_offset) == (0, None)
    watch.worker = WORKER
    link.worker_changed()
    await ask(watch, link, lambda: watch.kept == [HOLD])


async def test_words_are_lost_with_the_process_they_are_for(watch: FakeWatch) -> None:
    link, watch.worker = link_to(watch), None
    link.tell(WORKER, HOLD, keep=True)
    watch.worker = WorkerId("w:1", "i2")
    link.worker_changed()
    await ask(watch, link, lambda: not link._words)
    assert (watch.num_calls, watch.kept) == (1, []), "its clock was asked"


async def test_so_many_words_wait_and_the_oldest_make_room(
    watch: FakeWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_link, "_MAX_WORDS", 3)
    link, watch.fails = link_to(watch), failure(grpc.StatusCode.UNAVAILABLE)
    for hold in range(3):
        link.tell(WORKER, hold, keep=True)
    watch.on_call = lambda: link.tell(WORKER, 3, keep=True)
    await ask(watch, link, lambda: watch.num_calls == 1)
    watch.on_call, watch.fails = (lambda: None), None
    await ask(watch, link, lambda: not link._words)
    assert watch.kept == [1, 2, 3]


async def test_at_the_end_what_is_unsaid_is_said_at_once(watch: FakeWatch) -> None:
    link = link_to(watch)
    await link.finish()
    assert watch.num_calls == 0, "there is nothing to say"
    link.tell(WORKER, HOLD, keep=True)
    await link.finish()
    assert (watch.num_calls, watch.kept) == (1, [HOLD])


async def test_at_the_end_a_worker_that_does_not_answer_is_given_up(
    watch: FakeWatch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trace_link, "_CALL_PATIENCE_S", 0.01)
    link, watch.hangs = link_to(watch), True
    link.tell(WORKER, HOLD, keep=True)
    await link.finish()
    assert [record.message for record in caplog.records] == [
        "a worker did not hear which traces to send"
    ]


@pytest.mark.usefixtures("no_sockets")
async def test_a_router_that_ends_tells_its_workers_which_traces_to_send(
    watch: FakeWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``watch`` answers for both of them."""
    monkeypatch.setattr(WorkerWatch, "channel", FakeChannel())
    cluster = World(decode=2).cluster
    for hold, view in enumerate(cluster.snapshot().decode, start=HOLD):
        cluster.tell_trace(view.worker, hold, keep=True)
    await cluster.finish_traces()
    assert (watch.num_calls, sorted(watch.kept)) == (2, [HOLD, HOLD + 1])
