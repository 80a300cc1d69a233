"""A request's spans at its router: ids before they are written, and none without its parent."""

import time
from collections.abc import Callable, Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext, get_current_span

from diptych.telemetry import attributes, tracing
from diptych.telemetry.sampling import WHOLE, Sampling
from diptych.telemetry.stages import REQUEST_STAGES, Stage
from diptych.telemetry.tracing import Tracing
from router.cluster.worker_clock import ClockOffset
from router.placement.views import WorkerId
from router.request.response_builder import Moments
from router.trace import UNFINISHED, RequestTrace
from tests.unit.router.told_workers import ToldWorkers

CLIENT = tracing.extract_map({"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"})
PREFILL, DECODE = WorkerId("p:1", "p"), WorkerId("d:1", "d")
RETRY = {attributes.FALLBACK: "rebind", attributes.ERROR_TYPE: "KV_TRANSFER_INTERRUPTED"}


def moments(num_passed: int) -> Moments:
    """Of a request that came through so many stages, of 1 s each, and is in the next."""
    now = time.monotonic()
    points: list[float | None] = [
        now - num_passed + i if i <= num_passed else None for i in range(6)
    ]
    _, placed, first, written, second, last = points
    return Moments(
        received_s=now - num_passed,
        placed_s=placed,
        first_token_s=first,
        first_written_s=written,
        second_written_s=second,
        last_written_s=last,
    )


class Traced:
    """One request, and the spans that it leaves."""

    def __init__(
        self, sampled: Sampling = WHOLE, wall_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self._exporter = InMemorySpanExporter()
        self.workers = ToldWorkers()
        self.tracing = Tracing("test", exporter=self._exporter, sampled=sampled, wall_ns=wall_ns)
        self.trace = RequestTrace(
            self.tracing, "chat m", CLIENT, self.workers, received_s=0.0, marks={}
        )

    def spans(self) -> dict[str, ReadableSpan]:
        """By name, those of attempts with their number."""
        self.tracing.shutdown()
        named = {}
        for span in self._exporter.get_finished_spans():
            number = (span.attributes or {}).get(attributes.ATTEMPT)
            named[span.name if number is None else f"{span.name} {number}"] = span
        return named

    def parents(self) -> dict[str, str]:
        """The name of each span's parent."""
        spans = self.spans()
        names = {span.context.span_id: name for name, span in spans.items() if span.context}
        return {n: names.get(s.parent.span_id, "") for n, s in spans.items() if s.parent}


def test_a_retry_lies_in_its_request_also_where_the_clock_was_set_since() -> None:
    """Spans go by the clock of the start, so what happens in them does."""
    traced = Traced(wall_ns=lambda: time.time_ns() - 3600 * 10**9)
    traced.trace.ask(attributes.PREFILL_WORKER, PREFILL)
    traced.trace.retry(Stage.PREFILL, RETRY, "KV_TRANSFER_INTERRUPTED")
    traced.trace.end(None, "ok", None)
    whole = traced.spans()["chat m"]
    (event,) = whole.events
    assert whole.start_time is not None
    assert whole.end_time is not None
    assert whole.start_time <= event.timestamp <= whole.end_time


@pytest.fixture
def traced() -> Iterator[Traced]:
    made = Traced()
    yield made
    made.tracing.shutdown()


def test_stages_hang_under_the_request_and_the_attempt_under_what_it_explains(
    traced: Traced,
) -> None:
    trace = traced.trace
    trace.ask(attributes.PREFILL_WORKER, PREFILL)
    at_lease = trace.attempt
    trace.ask(attributes.DECODE_WORKER, DECODE)
    run = trace.stage(Stage.DECODE)
    trace.expect(Stage.DECODE)
    assert trace.attempt == at_lease
    with traced.tracing.span(Stage.PREFILL_COMPUTE, at_lease):
        pass
    with traced.tracing.span(Stage.DECODE_RUN, run):
        pass
    trace.end(moments(5), "ok", None)
    stages = {stage.span_name: "chat m" for stage in REQUEST_STAGES}
    assert traced.parents() == {
        "chat m": "",
        **stages,
        "diptych.attempt 1": Stage.PREFILL.span_name,
        Stage.PREFILL_COMPUTE.span_name: "diptych.attempt 1",
        Stage.DECODE_RUN.span_name: Stage.DECODE.span_name,
    }
    marks = traced.spans()["diptych.attempt 1"].attributes
    assert marks is not None
    assert marks[attributes.PREFILL_WORKER] == "p:1"
    assert marks[attributes.DECODE_WORKER] == "d:1"


def test_a_retry_is_another_attempt_linked_to_the_one_that_failed(traced: Traced) -> None:
    traced.trace.ask(attributes.PREFILL_WORKER, PREFILL)
    failed = traced.trace.attempt
    traced.trace.retry(Stage.HANDOFF, RETRY, "KV_TRANSFER_INTERRUPTED")
    assert traced.trace.attempt != failed
    traced.trace.end(moments(5), "ok", None)
    spans, parents = traced.spans(), traced.parents()
    first, second = spans["diptych.attempt 1"], spans["diptych.attempt 2"]
    assert parents["diptych.attempt 1"] == Stage.PREFILL.span_name
    assert parents["diptych.attempt 2"] == Stage.HANDOFF.span_name
    assert (first.status.description, second.status.description) == (RETRY["error.type"], None)
    (link,) = second.links
    assert link.context == first.context
    assert link.attributes == RETRY
    (event,) = spans["chat m"].events
    assert (event.name, event.attributes) == ("retry", RETRY)


@pytest.mark.parametrize("error", ["STEP_FAILED", None])
def test_attempts_of_prompts_alone_have_their_stage_too(traced: Traced, error: str | None) -> None:
    """Nobody times those one by one."""
    traced.trace.ask(attributes.PREFILL_WORKER, PREFILL)
    traced.trace.end(None, error or "ok", error)
    parents, spans = traced.parents(), traced.spans()
    assert parents["diptych.attempt 1"] == Stage.PREFILL.span_name
    assert parents[Stage.PREFILL.span_name] == "chat m"
    stage, attempt = spans[Stage.PREFILL.span_name], spans["diptych.attempt 1"]
    assert (stage.start_time or 0) <= (attempt.start_time or 0)
    assert stage.status.description == (None if error is None else UNFINISHED)


@pytest.mark.parametrize("num_passed", range(5))
@pytest.mark.parametrize("error", ["STEP_FAILED", None])
def test_wherever_it_breaks_off_each_span_has_its_parent(
    traced: Traced, num_passed: int, error: str | None
) -> None:
    """``None``: the client left."""
    if num_passed:
        traced.trace.ask(attributes.PREFILL_WORKER, PREFILL)
    if num_passed > 1:  # the decode worker began, and perhaps nothing of it reached the client
        traced.trace.retry(Stage.HANDOFF, RETRY, "KV_TRANSFER_INTERRUPTED")
        traced.trace.expect(Stage.DECODE)
    traced.trace.end(moments(num_passed), error or "cancelled", error)
    spans, parents = traced.spans(), traced.parents()
    assert [name for name, parent in parents.items() if not parent] == ["chat m"]
    entered = REQUEST_STAGES[: num_passed + 1]
    expected = {Stage.HANDOFF, Stage.DECODE} if num_passed > 1 else set()
    written = {stage.value for stage in REQUEST_STAGES if stage.span_name in spans}
    assert written == {*entered, *expected}
    broken = spans[entered[-1].span_name]
    assert broken.status.description == (None if error is None else UNFINISHED)
    root = spans["chat m"]
    assert root.status.description == error
    assert (root.attributes or {})[attributes.OUTCOME] == (error or "cancelled")


def test_a_hand_off_that_nothing_followed_never_was_one(traced: Traced) -> None:
    traced.trace.ask(attributes.PREFILL_WORKER, PREFILL)
    traced.trace.end(moments(3), "ok", None)
    assert Stage.HANDOFF.span_name not in traced.spans()


def test_workers_are_told_whether_the_request_is_traced() -> None:
    def context(trace: RequestTrace) -> SpanContext:
        return get_current_span(trace.stage(Stage.DECODE)).get_span_context()

    for ratio in (0.0, 1.0):
        traced = Traced(Sampling(ratio, caller_per_s=0.0))
        told = context(traced.trace)
        assert told.trace_flags.sampled == bool(ratio)
        assert f"{told.trace_id:032x}" == "a" * 32
        traced.trace.ask(attributes.PREFILL_WORKER, PREFILL)
        traced.trace.end(moments(5), "ok", None)
        assert bool(traced.spans()) == bool(ratio)


def test_without_an_exporter_workers_get_the_clients_context() -> None:
    trace = RequestTrace(Tracing("test"), "chat m", CLIENT, ToldWorkers(), received_s=0.0, marks={})
    trace.ask(attributes.PREFILL_WORKER, PREFILL)
    trace.retry(Stage.PREFILL, RETRY, "KV_TRANSFER_INTERRUPTED")
    for context in (trace.context, trace.attempt, trace.stage(Stage.DECODE)):
        assert tracing.inject_map(context) == tracing.inject_map(CLIENT)
    trace.end(moments(2), "cancelled", None)


@pytest.mark.parametrize("keep", [True, False])
def test_all_who_were_asked_hear_whether_a_held_trace_is_sent(keep: bool) -> None:
    traced = Traced(Sampling(0.0, caller_per_s=0.0, holds=True))
    traced.trace.ask(attributes.PREFILL_WORKER, PREFILL)
    traced.trace.ask(attributes.DECODE_WORKER, DECODE)
    hold = tracing.hold_of(traced.trace.attempt)
    assert hold is not None
    assert tracing.hold_of(traced.trace.stage(Stage.DECODE)) == hold
    assert not traced.workers.words
    traced.trace.end(moments(5), "ok", None, keep=keep)
    assert sorted(traced.workers.words) == [(DECODE, hold, keep), (PREFILL, hold, keep)]
    assert len(traced.spans()) == (len(REQUEST_STAGES) + 2 if keep else 0)


def test_who_was_asked_hears_of_a_retry_at_once() -> None:
    """It may be about to go, and the request may run for long elsewhere."""
    traced = Traced(Sampling(0.0, caller_per_s=0.0, holds=True))
    traced.trace.ask(attributes.DECODE_WORKER, DECODE)
    hold = tracing.hold_of(traced.trace.attempt)
    traced.trace.retry(Stage.PREFILL, RETRY, "KV_TRANSFER_INTERRUPTED")
    assert traced.workers.words == [(DECODE, hold, True)]
    traced.trace.end(moments(5), "ok", None, keep=True)


def test_of_a_trace_that_is_sampled_workers_hear_nothing(traced: Traced) -> None:
    traced.trace.ask(attributes.PREFILL_WORKER, PREFILL)
    traced.trace.end(moments(5), "ok", None, keep=True)
    assert not traced.workers.words


def test_an_attempt_tells_how_its_workers_clocks_stand(traced: Traced) -> None:
    traced.workers.offsets[DECODE] = ClockOffset(-2.5, 0.001)
    traced.trace.ask(attributes.PREFILL_WORKER, PREFILL)
    traced.trace.ask(attributes.DECODE_WORKER, DECODE)
    traced.trace.end(moments(5), "ok", None)
    marks = traced.spans()["diptych.attempt 1"].attributes
    assert marks is not None
    assert {key: value for key, value in marks.items() if "clock" in key} == {
        "diptych.decode_worker.clock_offset_s": -2.5,
        "diptych.decode_worker.clock_uncertainty_s": 0.001,
    }


def test_an_attempt_tells_why_its_workers_were_chosen(traced: Traced) -> None:
    for choice, worker in (("p:1 chosen", PREFILL), ("p:2 chosen", WorkerId("p:2", "p2"))):
        traced.trace.choose({attributes.PREFILL_CANDIDATES: [choice]})
        traced.trace.ask(attributes.PREFILL_WORKER, worker)
        if worker == PREFILL:
            traced.trace.retry(Stage.PREFILL, RETRY, "KV_TRANSFER_INTERRUPTED")
    traced.trace.end(moments(5), "ok", None)
    told = [
        (traced.spans()[f"diptych.attempt {number}"].attributes or {})[
            attributes.PREFILL_CANDIDATES
        ]
        for number in (1, 2)
    ]
    assert told == [("p:1 chosen",), ("p:2 chosen",)]
