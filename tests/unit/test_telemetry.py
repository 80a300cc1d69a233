"""One enum of stages; spans with times known afterwards; bounded labels; JSON logs."""

import gc
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, generate_latest

from diptych.errors import ConfigurationError
from diptych.process import ProcessConfig, settle
from diptych.service_host import ServiceHost, standard_tracing
from diptych.telemetry import attributes
from diptych.telemetry.families import EngineMetrics, RequestMetrics, TransferMetrics
from diptych.telemetry.metrics import Metrics
from diptych.telemetry.sampling import Sampling
from diptych.telemetry.stages import REQUEST_STAGES, TTFT_STAGES, Stage
from diptych.telemetry.standard_tracing import StandardTracing
from diptych.telemetry.tracing import (
    Tracing,
    context_of,
    extract_map,
    extract_metadata,
    inject_map,
    inject_metadata,
    trace_id,
)
from diptych.v1 import inference_pb2


def test_stages_are_those_of_the_timing_message() -> None:
    fields = {field.name for field in inference_pb2.Timing.DESCRIPTOR.fields}
    for stage in TTFT_STAGES:
        assert f"{stage}_s" in fields
    assert f"{Stage.DECODE}_s" in fields
    assert len(set(REQUEST_STAGES)) == len(REQUEST_STAGES)


class TestTracing:
    def setup_method(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracing = Tracing("test", exporter=self.exporter, instance_id="i1")

    def test_one_trace_over_two_processes(self) -> None:
        exporter = InMemorySpanExporter()
        other = Tracing("other", exporter=exporter)
        root = self.tracing.start("chat m", attributes={attributes.REQUEST_MODEL: "m"})
        metadata = inject_metadata(context_of(root))
        carried = inject_map(context_of(root))
        with other.span(Stage.PREFILL_COMPUTE, extract_metadata(metadata)):
            pass
        with other.span(Stage.TRANSFER, extract_map(carried)):
            pass
        self.tracing.end(root)
        for tracing in (self.tracing, other):
            tracing.shutdown()
        finished = [*self.exporter.get_finished_spans(), *exporter.get_finished_spans()]
        spans = {span.name: span for span in finished}
        assert set(spans) == {"chat m", "diptych.prefill_compute", "diptych.transfer"}
        assert len({span.context.trace_id for span in spans.values() if span.context}) == 1
        parent = spans["diptych.transfer"].parent
        assert parent is not None
        assert parent.span_id == root.get_span_context().span_id
        assert trace_id(context_of(root)) == f"{root.get_span_context().trace_id:032x}"
        marks = spans["diptych.transfer"].attributes
        assert marks is not None
        assert marks[attributes.STAGE] == "transfer"

    @pytest.mark.parametrize("num_characters", [512, 513, 8000])
    def test_a_trace_state_is_passed_on_as_far_as_metadata_has_room(
        self, num_characters: int
    ) -> None:
        above = f"00-{'a' * 32}-{'b' * 16}-01"
        entries = [f"a{i}={'x' * 250}" for i in range(num_characters // 255)]
        rest = num_characters - len(",".join(entries)) - len(",z=")
        state = ",".join([*entries, "z=" + "y" * rest])
        assert len(state) == num_characters
        context = extract_map({"traceparent": above, "tracestate": state})
        passed_on = inject_map(context)
        assert dict(inject_metadata(context)) == passed_on
        kept = passed_on["tracestate"].split(",")
        assert kept[:2] == entries[:2], "those in front are the newest"
        assert set(kept[2:]) <= {state.split(",")[-1]}
        assert len(passed_on["tracestate"]) <= 512
        assert (passed_on["tracestate"] == state) == (num_characters <= 512)
        assert passed_on["traceparent"] == above

    def test_a_trace_state_of_one_long_entry_is_not_passed_on(self) -> None:
        above = f"00-{'a' * 32}-{'b' * 16}-01"
        context = extract_map({"traceparent": above, "tracestate": f"a={'x' * 600}"})
        assert inject_map(context) == {"traceparent": above}

    def test_spans_recorded_afterwards_tile_their_parent(self) -> None:
        began = time.monotonic() - 2
        root = self.tracing.start("chat m", start_s=began)
        moments = [began, began + 0.5, began + 1.25, began + 1.5]
        for stage, start_s, end_s in zip(TTFT_STAGES, moments, moments[1:], strict=False):
            self.tracing.record(stage, context_of(root), start_s, end_s)
        self.tracing.end(root, end_s=began + 1.5)
        self.tracing.shutdown()
        lengths = {}
        for span in self.exporter.get_finished_spans():
            assert span.start_time is not None
            assert span.end_time is not None
            lengths[span.name] = (span.end_time - span.start_time) / 1e9
        assert lengths["diptych.queue"] == pytest.approx(0.5)
        assert sum(lengths[s.span_name] for s in TTFT_STAGES) == pytest.approx(lengths["chat m"])

    def test_an_error_marks_the_span(self) -> None:
        with pytest.raises(ValueError, match="x"), self.tracing.span(Stage.DECODE):
            raise ValueError("x")
        self.tracing.shutdown()
        (span,) = self.exporter.get_finished_spans()
        assert not span.status.is_ok
        assert span.attributes is not None
        assert span.attributes[attributes.ERROR_TYPE] == "ValueError"

    def test_the_client_decides_about_sampling(self) -> None:
        tracing = Tracing("test", exporter=self.exporter, sampled=Sampling(0.0))
        tracing.end(tracing.start("unsampled"))
        asked = extract_metadata([("traceparent", f"00-{'a' * 32}-{'b' * 16}-01")])
        tracing.end(tracing.start("sampled", asked))
        tracing.shutdown()
        assert [span.name for span in self.exporter.get_finished_spans()] == ["sampled"]

    def test_a_clock_that_is_set_does_not_change_lengths(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = SimpleNamespace(monotonic=lambda: 10.0)
        monkeypatch.setattr("diptych.telemetry.tracing.time", clock)
        span = self.tracing.start("x")
        monkeypatch.setattr("opentelemetry.sdk.trace.time_ns", lambda: 1)
        clock.time_ns = lambda: 1
        clock.monotonic = lambda: 10.25
        self.tracing.end(span)
        self.tracing.shutdown()
        (ended,) = self.exporter.get_finished_spans()
        assert ended.start_time is not None
        assert ended.end_time is not None
        assert ended.end_time - ended.start_time == 250_000_000

    def test_spans_follow_a_clock_that_is_set(self) -> None:
        """Or that went on while the machine slept, as the monotonic one does not."""
        ahead_ns = 0
        tracing = Tracing("test", exporter=self.exporter, wall_ns=lambda: time.time_ns() + ahead_ns)
        hour_ns = 3600 * 10**9
        under_way = tracing.start("under way")
        for ahead_ns in (hour_ns, -hour_ns):
            assert tracing.now_s() == pytest.approx((time.time_ns() + ahead_ns) / 1e9, abs=60)
            tracing.end(tracing.start(f"begun at {ahead_ns}"))
            now_s = time.monotonic()
            tracing.record(Stage.DECODE, context_of(under_way), now_s - 1, now_s)
        tracing.end(under_way)
        tracing.shutdown()
        finished = self.exporter.get_finished_spans()
        times = [(each.start_time or 0, each.end_time or 0) for each in finished]
        hours_ahead = [(start - time.time_ns()) / hour_ns for start, _ in times]
        assert hours_ahead == pytest.approx([1, 1, -1, -1, 0], abs=0.1)
        assert all(0 <= end - start < 60 * 10**9 for start, end in times)

    def test_the_standard_variables_are_left_to_the_sdk(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "k8s.pod.name=p-0,service.version=9")
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
        standard = standard_tracing()
        assert Tracing("test", standard=standard).enabled
        tracing = Tracing("test", standard=standard, exporter=self.exporter)
        tracing.end(tracing.start("unsampled"))
        monkeypatch.delenv("OTEL_TRACES_SAMPLER")
        tracing = Tracing("test", standard=standard_tracing(), exporter=self.exporter)
        tracing.end(tracing.start("x"))
        tracing.shutdown()
        (span,) = self.exporter.get_finished_spans()
        told = span.resource.attributes
        assert (told["service.name"], told["k8s.pod.name"]) == ("mine", "p-0")

    @pytest.mark.parametrize(
        ("said", "name"),
        [
            ("k8s.pod.name=p-0, service.name = our%20llm", "our llm"),
            ("service.name=", "test"),
            ("service.names=x,service.name", "test"),
        ],
    )
    def test_a_service_is_named_among_what_is_said_of_the_process(
        self, monkeypatch: pytest.MonkeyPatch, said: str, name: str
    ) -> None:
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", said)
        tracing = Tracing("test", standard=standard_tracing(), exporter=self.exporter)
        tracing.end(tracing.start("x"))
        tracing.shutdown()
        (span,) = self.exporter.get_finished_spans()
        assert span.resource.attributes["service.name"] == name

    @pytest.mark.parametrize("name", ["OTLP_PROTOCOL", "OTLP_TRACES_PROTOCOL"])
    @pytest.mark.parametrize("endpoint", ["OTLP_ENDPOINT", "OTLP_TRACES_ENDPOINT"])
    def test_another_protocol_is_refused_by_name(
        self, monkeypatch: pytest.MonkeyPatch, name: str, endpoint: str
    ) -> None:
        monkeypatch.setenv(f"OTEL_EXPORTER_{endpoint}", "http://127.0.0.1:1")
        monkeypatch.setenv(f"OTEL_EXPORTER_{name}", "http/json")
        with pytest.raises(ConfigurationError, match=f"OTEL_EXPORTER_{name}: .*'http/json'"):
            standard_tracing()
        monkeypatch.setenv(f"OTEL_EXPORTER_{name}", "grpc")
        assert standard_tracing() == StandardTracing(has_endpoint=True)
        monkeypatch.setenv(f"OTEL_EXPORTER_{name}", "http/protobuf")
        assert standard_tracing() == StandardTracing(has_endpoint=True, is_http=True)

    def test_the_protocol_of_traces_comes_before_that_of_all_signals(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
        assert standard_tracing() == StandardTracing(has_endpoint=True)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json")
        with pytest.raises(ConfigurationError, match="OTEL_EXPORTER_OTLP_TRACES_PROTOCOL: "):
            standard_tracing()

    async def test_a_protocol_that_is_not_used_is_not_refused(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
        assert standard_tracing() == StandardTracing(), "nothing is traced"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
        host = ServiceHost(ProcessConfig(otlp_endpoint="http://127.0.0.1:2"))
        assert host.tracing.enabled, "where our setting says"
        host.tracing.shutdown(timeout_s=0.0)

    async def test_what_was_settled_may_go_once_the_host_is_left(self) -> None:
        """The process may go on, with another: nothing lives for ever."""
        async with ServiceHost(ProcessConfig()):
            settle()
            assert gc.get_freeze_count()
        assert not gc.get_freeze_count()

    def test_without_an_endpoint_context_is_still_passed_on(self) -> None:
        tracing = Tracing("test")
        assert not tracing.enabled
        asked = extract_metadata([("traceparent", f"00-{'a' * 32}-{'b' * 16}-01"), ("x-bin", b"")])
        span = tracing.start(Stage.QUEUE, asked)
        assert trace_id(context_of(span)) == "a" * 32
        tracing.record(Stage.QUEUE, asked, 0.0, 1.0)
        tracing.end(span, error="REASON")
        tracing.shutdown()
        assert extract_metadata(None) == {}
        assert trace_id(extract_metadata(None)) == ""

    def test_a_span_that_is_recorded_afterwards_is_sampled_as_one_that_was_begun(self) -> None:
        """By whom it hangs under, and by chance where it begins a trace."""
        tracing = Tracing("test", exporter=self.exporter, sampled=Sampling(0.0))
        asked, unasked = (
            extract_metadata([("traceparent", f"00-{'a' * 32}-{'b' * 16}-{flags}")])
            for flags in ("01", "00")
        )
        above = tracing.record(Stage.TRANSFER, asked, 0.0, 1.0)
        tracing.record(Stage.TRANSFER_EXPOSED, above, 0.5, 1.0)
        for parent in (unasked, extract_metadata(None)):
            carried = inject_map(tracing.record(Stage.DECODE, parent, 0.0, 1.0))
            assert carried["traceparent"].endswith("-00")
        tracing.shutdown()
        whole, exposed = self.exporter.get_finished_spans()
        assert (whole.name, exposed.name) == ("diptych.transfer", "diptych.transfer_exposed")
        assert whole.parent is not None
        assert exposed.parent == whole.context
        assert (whole.parent.is_remote, f"{whole.parent.span_id:x}") == (True, "b" * 16)

    def test_a_span_that_is_recorded_afterwards_may_begin_a_trace(self) -> None:
        self.tracing.record(Stage.QUEUE, extract_metadata(None), 0.0, 1.0)
        self.tracing.shutdown()
        (first,) = self.exporter.get_finished_spans()
        assert first.parent is None
        assert first.context is not None
        assert first.context.is_valid

    def test_what_the_variables_say_holds_for_spans_that_are_recorded_afterwards(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = extract_metadata([("traceparent", f"00-{'a' * 32}-{'b' * 16}-01")])
        monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "2")
        monkeypatch.setenv("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "3")
        tracing = Tracing("test", exporter=self.exporter)
        tracing.record(Stage.QUEUE, asked, 0.0, 1.0, attributes={"a": "12345", "b": ["67890"]})
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
        none = InMemorySpanExporter()
        unsampled = Tracing("test", standard=standard_tracing(), exporter=none)
        unsampled.record(Stage.DECODE, asked, 0.0, 1.0)
        for each in (tracing, unsampled):
            each.shutdown()
        assert not none.get_finished_spans()
        (span,) = self.exporter.get_finished_spans()
        assert span.attributes == {"a": "123", "b": ("678",)}
        assert span.dropped_attributes == 1

    @pytest.mark.parametrize(
        ("said", "is_enabled"), [("true", False), (" True", False), ("1", True)]
    )
    def test_the_variable_that_disables_the_sdk_disables_tracing(
        self, monkeypatch: pytest.MonkeyPatch, said: str, is_enabled: bool
    ) -> None:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
        monkeypatch.setenv("OTEL_SDK_DISABLED", said)
        tracing = Tracing("test", standard=standard_tracing(), exporter=self.exporter)
        assert tracing.enabled == is_enabled
        tracing.record(Stage.QUEUE, extract_metadata(None), 0.0, 1.0)
        tracing.shutdown()
        assert len(self.exporter.get_finished_spans()) == is_enabled

    def test_spans_of_some_seconds_go_out_together(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An export costs more than many spans; the variables may say otherwise."""
        asked: list[dict[str, object]] = []

        class Queue(BatchSpanProcessor):
            def __init__(self, exporter: SpanExporter, **settings: object) -> None:
                asked.append(settings)
                super().__init__(exporter)

        monkeypatch.setattr("diptych.telemetry.span_provider.BatchSpanProcessor", Queue)
        Tracing("test", exporter=self.exporter).shutdown()
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        Tracing("test", standard=standard_tracing(), exporter=self.exporter).shutdown()
        assert asked[0]["schedule_delay_millis"] == 2000
        assert "schedule_delay_millis" not in asked[1]

    def test_a_dead_collector_does_not_delay_the_exit(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        answers = threading.Event()

        class Stuck(SpanExporter):
            def export(self, spans: object) -> SpanExportResult:
                answers.wait()
                return SpanExportResult.FAILURE

        tracing = Tracing("test", exporter=Stuck())
        tracing.end(tracing.start("x"))
        tracing.shutdown(timeout_s=0.05)
        assert "spans were left unsent" in caplog.text
        answers.set()

    @pytest.mark.parametrize("max_queued", [4096, 600])
    def test_each_span_is_sent_unsent_or_waits_while_a_collector_hangs(
        self, monkeypatch: pytest.MonkeyPatch, max_queued: int
    ) -> None:
        """And none is told of nowhere once the process ends, whatever has become of it."""
        if max_queued != 4096:
            monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", str(max_queued))
        collector = Hung()
        tracing = Tracing("test", standard=standard_tracing(), exporter=collector)
        for _ in range(512):  # a batch, which the collector gets; on a slow machine a part of it
            tracing.end(tracing.start("x"))
        collector.asked.wait()
        assert (tracing.num_sent, tracing.num_unsent) == (0, 0), "it may still take them"
        for _ in range(max_queued + 100):
            tracing.end(tracing.start("x"))
        num_dropped = 512 + 100 - collector.num_asked
        assert (tracing.num_sent, tracing.num_unsent) == (0, num_dropped), "the queue was full"
        tracing.shutdown(timeout_s=0.01)
        assert (tracing.num_sent, tracing.num_unsent) == (0, 512 + max_queued + 100)
        tracing.end(tracing.start("x"))
        assert tracing.num_unsent == 512 + max_queued + 101, "too late"
        collector.answers.set()

    def test_a_batch_that_fails_is_unsent_and_none_twice(self) -> None:
        collector = Hung()
        collector.answers.set()
        tracing = Tracing("test", exporter=collector)
        for _ in range(3):
            tracing.end(tracing.start("x"))
        tracing.shutdown()
        assert (tracing.num_sent, tracing.num_unsent) == (0, 3)

    @pytest.mark.parametrize(("said", "bound"), [("600", 600), ("many", 2048), ("", 2048)])
    def test_the_queue_is_as_the_variables_say(
        self, monkeypatch: pytest.MonkeyPatch, said: str, bound: int
    ) -> None:
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1000")
        monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", said)
        standard = standard_tracing()
        assert (standard.has_batching, standard.max_queued) == (True, bound)


class Hung(SpanExporter):
    """A collector that answers nobody until it may, and then takes nothing."""

    def __init__(self) -> None:
        self.asked, self.answers = threading.Event(), threading.Event()
        self.num_asked = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.num_asked += len(spans)
        self.asked.set()
        self.answers.wait()
        return SpanExportResult.FAILURE


def without_moments(text: str) -> list[str]:
    """Its lines, where a sample that says when something was made has no value."""
    return [line.rsplit(" ", 1)[0] if "_created " in line else line for line in text.splitlines()]


class TestMetrics:
    def setup_method(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = Metrics(self.registry)

    def text(self) -> str:
        return generate_latest(self.registry).decode()

    def test_a_family_exists_whole_from_the_start_and_refuses_other_values(self) -> None:
        family = self.metrics.counters("x_total", "Xs.", "why", ["a", "b"])
        family["a"].inc()
        assert 'diptych_x_total{why="a"} 1.0' in self.text()
        assert 'diptych_x_total{why="b"} 0.0' in self.text()
        with pytest.raises(KeyError):
            family["c"]

    def test_a_read_gauge_follows_live_state(self) -> None:
        peers = {"a:1": 2.0}
        self.metrics.read_gauges(
            "rate", "Rates.", ["peer"], lambda: [((p,), v) for p, v in peers.items()]
        )
        assert 'diptych_rate{peer="a:1"} 2.0' in self.text()
        peers.clear()
        assert "a:1" not in self.text()

    def test_a_loop_histogram_says_what_the_librarys_own_would(self) -> None:
        buckets = (0.001, 0.5, 1.0, 2.5)
        theirs = CollectorRegistry()
        plain = Metrics(theirs).histogram("gap_seconds", "Gaps.", buckets)
        ours = self.metrics.loop_histogram("gap_seconds", "Gaps.", buckets)
        assert without_moments(self.text()) == without_moments(generate_latest(theirs).decode())
        for value, num_times in [(0.0, 3), (0.0005, 1), (0.001, 1), (0.5, 2), (2.4, 1), (99.0, 4)]:
            ours.observe(value, num_times)
            for _ in range(num_times):
                plain.observe(value)
        assert without_moments(self.text()) == without_moments(generate_latest(theirs).decode())

    def test_block_owners_are_counted_once(self) -> None:
        blocks = {"total": 7, "free": 3, "cached": 4}
        EngineMetrics(self.metrics, lambda: list(blocks.items()), lambda: 1, lambda: 2)
        assert 'diptych_kv_blocks{owner="free"} 3.0' in self.text()
        assert 'owner="total"' not in self.text()
        assert "diptych_sequences_waiting 2.0" in self.text()

    def test_every_metric_is_defined(self) -> None:
        RequestMetrics(self.metrics, ["ok"], ["local"])
        TransferMetrics(self.metrics, ["nixl"], ["transport"])
        families = list(self.registry.collect())
        assert len(families) > 15
        for family in families:
            assert family.documentation.endswith("."), family.name
        names = {family.name for family in families}
        assert "gen_ai_server_time_to_first_token_seconds" in names
        stages = [s.labels["stage"] for f in families for s in f.samples if "stage" in s.labels]
        assert set(stages) == {*REQUEST_STAGES, Stage.TRANSFER, Stage.TRANSFER_EXPOSED}
