"""Which traces are sent: at once, held and sent, held and dropped; within bounds."""

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, get_current_span

from diptych.telemetry import held_spans, tracing
from diptych.telemetry.held_spans import HeldSpans
from diptych.telemetry.plain_span import PlainSpan
from diptych.telemetry.samplers import sampler_of
from diptych.telemetry.sampling import Sampling
from diptych.telemetry.span_writer import SpanWriter
from diptych.telemetry.stages import Stage
from diptych.telemetry.standard_tracing import NOTHING_STANDARD, StandardTracing
from diptych.telemetry.tracing import Tracing

ASKED = f"00-{'a' * 32}-{'b' * 16}-01"
WORKER = Sampling(0.0)
EDGE = Sampling(0.0, caller_per_s=0.0, holds=True)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Process:
    """Its spans, and what came of them."""

    def __init__(
        self, sampled: Sampling = WORKER, standard: StandardTracing = NOTHING_STANDARD
    ) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracing = Tracing("test", exporter=self._exporter, sampled=sampled, standard=standard)

    def sent(self) -> list[str]:
        self.tracing.shutdown()
        return [span.name for span in self._exporter.get_finished_spans()]


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("is_early", [True, False], ids=["early", "late"])
def test_what_is_held_in_two_processes_waits_for_the_word(keep: bool, is_early: bool) -> None:
    router, worker = Process(EDGE), Process()
    root = router.tracing.start("chat m")
    carried = tracing.inject_map(tracing.context_of(root))
    parent = tracing.extract_map(carried)
    hold = tracing.hold_of(parent)
    assert hold is not None
    if is_early:  # what ends after the word goes where the word sent the others
        worker.tracing.decide(hold, keep=keep)
    worker.tracing.record(Stage.DECODE_RUN, parent, 0.0, 1.0)
    assert worker.tracing.num_held == (0 if is_early else 1)
    router.tracing.record(Stage.QUEUE, tracing.context_of(root), 0.0, 1.0)
    router.tracing.end(root)
    assert router.tracing.num_held == 2
    for process in (router, worker):
        process.tracing.decide(hold, keep=keep)
        assert process.tracing.num_held == 0
    assert router.sent() == (["diptych.queue", "chat m"] if keep else [])
    assert worker.sent() == (["diptych.decode_run"] if keep else [])


@pytest.mark.parametrize("sampler", ["always_off", "traceidratio", "parentbased_always_off"])
def test_what_is_held_is_recorded_whatever_the_variables_sample(
    sampler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router's word is the last: a slow request's trace has its workers' spans."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    standard = StandardTracing(has_sampler=True)
    router, worker = Process(EDGE, standard), Process(WORKER, standard)
    parent = tracing.extract_map(
        tracing.inject_map(tracing.context_of(router.tracing.start("chat m")))
    )
    hold = tracing.hold_of(parent)
    assert hold is not None
    worker.tracing.record(Stage.DECODE_RUN, parent, 0.0, 1.0)
    worker.tracing.decide(hold, keep=True)
    worker.tracing.record(Stage.QUEUE, tracing.extract_map({}), 0.0, 1.0)
    assert worker.sent() == ["diptych.decode_run"]


def test_only_what_is_sent_costs_more_than_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK's spans are made of those alone, where they are sent."""
    written: list[str] = []

    class Writer(SpanWriter):
        def written(self, span: PlainSpan) -> ReadableSpan:
            written.append(span.name)
            return super().written(span)

    monkeypatch.setattr("diptych.telemetry.span_provider.SpanWriter", Writer)
    router = Process(EDGE)
    for name in ("kept", "dropped"):
        root = router.tracing.start(name)
        hold = tracing.hold_of(tracing.context_of(root))
        assert hold is not None
        router.tracing.end(root)
        router.tracing.decide(hold, keep=name == "kept")
    unsampled = Process(Sampling(0.0))
    unsampled.tracing.end(unsampled.tracing.start("unsampled"))
    assert (router.sent(), unsampled.sent(), written) == (["kept"], [], ["kept"])


@pytest.mark.parametrize("named", ["0123456789abcdef", "x", "zzzzzzzzzzzzzzzz"])
def test_a_client_names_no_hold(named: str) -> None:
    for flags in ("00", "01"):
        router = Process(EDGE)
        asked = {"traceparent": f"{ASKED[:-2]}{flags}", "tracestate": f"diptych={named},other=1"}
        root = router.tracing.start("chat m", tracing.extract_map(asked))
        hold = tracing.hold_of(tracing.context_of(root))
        assert hold is not None
        assert f"{hold:016x}" != named
        assert root.get_span_context().trace_state.get("other") == "1"


def test_a_client_that_fills_the_trace_state_is_not_traced_for_that(
    caplog: pytest.LogCaptureFixture,
) -> None:
    router = Process(EDGE)
    state = ",".join(f"k{index}=1" for index in range(32))
    asked = {"traceparent": f"{ASKED[:-2]}00", "tracestate": state}
    root = router.tracing.start("chat m", tracing.extract_map(asked))
    hold = tracing.hold_of(tracing.context_of(root))
    assert hold is not None
    kept = root.get_span_context().trace_state
    assert list(kept) == ["diptych", *(f"k{index}" for index in range(31))]
    router.tracing.end(root)
    router.tracing.decide(hold, keep=False)
    assert router.sent() == []
    assert not caplog.records


def test_workers_hold_their_spans_however_much_a_client_says(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What has no room is passed on to nobody, but for what they are held by."""
    state = ",".join(f"v{index}={'x' * 120}" for index in range(5))
    router, worker = Process(EDGE), Process(Sampling(0.0))
    asked = {"traceparent": f"{ASKED[:-2]}00", "tracestate": state}
    root = router.tracing.start("chat m", tracing.extract_map(asked))
    hold = tracing.hold_of(tracing.context_of(root))
    assert hold is not None
    wire = tracing.inject_map(tracing.context_of(root))
    assert tracing.hold_of(tracing.extract_map(wire)) == hold
    worker.tracing.end(worker.tracing.start("work", tracing.extract_map(wire)))
    worker.tracing.decide(hold, keep=False)
    assert worker.sent() == []
    assert not caplog.records


def test_what_is_sampled_at_once_is_not_held(caplog: pytest.LogCaptureFixture) -> None:
    router = Process(Sampling(1.0, caller_per_s=0.0, holds=True))
    root = router.tracing.start("chat m")
    assert tracing.hold_of(tracing.context_of(root)) is None
    router.tracing.end(root)
    assert router.sent() == ["chat m"]
    assert not caplog.records, "the SDK warns of what a trace state lacks"


def test_what_clients_want_traced_is_granted_at_a_rate() -> None:
    clock = Clock()
    sampler = sampler_of(Sampling(0.0, caller_per_s=2.0), clock)
    provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
    tracer = provider.get_tracer("test")
    asked = tracing.extract_map({"traceparent": ASKED})

    def num_granted(num_asked: int) -> int:
        spans = [tracer.start_span("x", asked) for _ in range(num_asked)]
        return sum(span.is_recording() for span in spans)

    assert num_granted(5) == 2
    clock.now += 0.5
    assert num_granted(5) == 1
    clock.now += 1000.0
    assert num_granted(5) == 2, "a pause does not save up"


def test_beyond_the_rate_a_wish_counts_as_none() -> None:
    asked = tracing.extract_map({"traceparent": ASKED})
    router = Process(Sampling(1.0, caller_per_s=0.0))
    router.tracing.end(router.tracing.start("as all others", asked))
    assert router.sent() == ["as all others"]


def test_beyond_the_rate_no_id_that_a_client_chooses_is_more_likely_than_another() -> None:
    draws = [0.2, 0.05, 0.9, 0.0, 0.5]
    sampling = Sampling(0.1, caller_per_s=0.0)
    sampler = sampler_of(sampling, Clock(), draw=iter(draws).__next__)
    provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
    tracer = provider.get_tracer("test")
    lowest = tracing.extract_map({"traceparent": f"00-{'a' * 16}{1:016x}-{'b' * 16}-01"})
    spans = [tracer.start_span("x", lowest) for _ in draws]
    assert [span.is_recording() for span in spans] == [False, True, False, True, False]


@pytest.mark.parametrize("flags", ["00", "01"])
@pytest.mark.parametrize("sampler", ["parentbased_traceidratio", "traceidratio"])
def test_no_sampler_of_the_variables_lets_clients_have_more_than_the_rate(
    flags: str, sampler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by their flag nor by the id that they choose."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "1e-9")
    router = Process(Sampling(1.0, caller_per_s=2.0), StandardTracing(has_sampler=True))
    lowest = tracing.extract_map({"traceparent": f"00-{'a' * 16}{1:016x}-{'b' * 16}-{flags}"})
    for _ in range(9):
        router.tracing.end(router.tracing.start("x", lowest))
    is_asked = flags == "01" or sampler == "traceidratio"
    assert len(router.sent()) == (2 if is_asked else 0)


def test_what_the_variables_sample_of_everybody_is_no_wish(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_on")
    router = Process(Sampling(0.0, caller_per_s=0.0), StandardTracing(has_sampler=True))
    router.tracing.end(router.tracing.start("x", tracing.extract_map({"traceparent": ASKED})))
    assert router.sent() == ["x"]


def test_a_client_that_wants_no_trace_has_none_unless_it_is_kept() -> None:
    unasked = tracing.extract_map({"traceparent": f"{ASKED[:-2]}00"})
    for holds in (False, True):
        router = Process(Sampling(1.0, caller_per_s=9.0, holds=holds))
        root = router.tracing.start("chat m", unasked)
        assert root.is_recording() == holds
        hold = tracing.hold_of(tracing.context_of(root))
        router.tracing.end(root)
        if hold is not None:
            router.tracing.decide(hold, keep=True)
        assert bool(router.sent()) == holds


class Holding:
    """Held spans, and those that they sent."""

    def __init__(self, *, max_spans: int = 100, max_age_s: float = 100.0) -> None:
        self.clock = Clock()
        self._sent: list[PlainSpan] = []
        self.held = HeldSpans(
            self._sent.append, self.clock, max_spans=max_spans, max_age_s=max_age_s
        )

    def end_span(self, hold: int) -> None:
        self.end_named(str(hold), f"diptych={hold:016x}")

    def end_named(self, name: str, state: str) -> None:
        above = tracing.extract_map({"traceparent": ASKED, "tracestate": state})
        context = get_current_span(above).get_span_context()
        self.held.ended(PlainSpan(context, context, name, SpanKind.INTERNAL, 0, {}, ()))

    def sent(self) -> list[str]:
        return [span.name for span in self._sent]


def test_of_many_words_the_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_spans, "_MAX_WORDS", 2)
    holding = Holding()
    for hold in (1, 2, 3):
        holding.held.decide(hold, keep=True)
    for hold in (1, 2, 3):
        holding.end_span(hold)
    assert (holding.sent(), holding.held.num_held) == (["2", "3"], 1)


def test_the_oldest_traces_make_room() -> None:
    holding = Holding(max_spans=3)
    for hold in (1, 1, 2, 3):
        holding.end_span(hold)
    assert (holding.held.num_held, holding.held.num_forgotten) == (2, 2)
    for hold in (1, 2, 3):
        holding.held.decide(hold, keep=True)
    assert holding.sent() == ["2", "3"]


def test_a_word_that_comes_too_late_sends_nothing() -> None:
    holding = Holding(max_age_s=10.0)
    holding.end_span(1)
    holding.clock.now += 9.0
    holding.end_span(2)
    holding.clock.now += 2.0
    holding.held.decide(2, keep=True)
    assert (holding.held.num_held, holding.held.num_forgotten) == (0, 1)
    holding.held.decide(1, keep=True)
    assert holding.sent() == ["2"]


@pytest.mark.parametrize("state", ["diptych=", "diptych=12", "other=1", "diptych=+123456789abcdef"])
def test_what_is_no_hold_is_sent_at_once(state: str) -> None:
    holding = Holding()
    holding.end_named("x", state)
    assert holding.sent() == ["x"]
