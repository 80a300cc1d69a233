"""Spans and counters of one sequence's life."""

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from decode_worker.observer import StreamObserver, outcome_names
from decode_worker.outbox import NewToken
from decode_worker.router_sequences import Fallback
from diptych.engine.scheduling.sequence import Sequence, SequenceKey
from diptych.telemetry.families import EngineMetrics, TransferMetrics
from diptych.telemetry.metrics import Metrics
from diptych.telemetry.tracing import Tracing
from diptych.v1 import common_pb2, decode_pb2
from kvtransfer.reader.pull_machine import PullError

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def tracing(exporter: InMemorySpanExporter) -> Tracing:
    return Tracing("diptych-decode", exporter=exporter)


@pytest.fixture
def observer(tracing: Tracing, registry: CollectorRegistry) -> StreamObserver:
    metrics = Metrics(registry)
    engine = EngineMetrics(metrics, lambda: [], lambda: 0, lambda: 0)
    return StreamObserver(tracing, engine, TransferMetrics(metrics, ["inline"], outcome_names()))


RUN, FIRST, SECOND = "b7ad6b7169203331", "00f067aa0ba902b7", "53995c3f42cd8ad8"  # span ids


def context(span_id: str) -> dict[str, str]:
    return {"traceparent": f"00-{TRACE_ID}-{span_id}-01"}


def reserve() -> tuple[decode_pb2.Reserve, Sequence]:
    spec = common_pb2.SequenceSpec(token_ids=[1, 2], num_prompt_tokens=2)
    sequence = Sequence.from_spec(SequenceKey("r", 7), spec, prefill_only=False)
    command = decode_pb2.Reserve(sequence_id=7, spec=spec, trace_context=context(RUN))
    return command, sequence


def test_a_handed_off_sequence(
    observer: StreamObserver,
    tracing: Tracing,
    exporter: InMemorySpanExporter,
    registry: CollectorRegistry,
) -> None:
    command, sequence = reserve()
    sequence.num_cached_tokens = 1
    observer.reserved(command, sequence)
    sequence.num_cached_tokens = 0
    stats = common_pb2.TransferStats(
        transport="inline", num_bytes=64, num_tokens=2, read_s=0.01, exposed_s=0.02, total_s=0.1
    )
    pulling = observer.pulling(7)
    observer.pulled(pulling, stats)
    observer.started(decode_pb2.Start(sequence_id=7), sequence, None)
    observer.stepped([NewToken(7, 3, 5, None)])
    observer.ended(sequence, decode_pb2.Ended(sequence_id=7, num_computed_tokens=1))
    observer.ended(sequence, decode_pb2.Ended(sequence_id=7))
    tracing.shutdown()
    spans = exporter.get_finished_spans()
    assert [span.name for span in spans] == [
        "diptych.transfer",
        "diptych.transfer_exposed",
        "diptych.decode_run",
    ]
    assert {f"{span.context.trace_id:032x}" for span in spans if span.context} == {TRACE_ID}
    assert spans[0].attributes is not None
    assert spans[0].attributes["diptych.transfer.bytes"] == 64
    assert spans[0].attributes["diptych.transfer.reused_tokens"] == 1
    assert spans[0].attributes["diptych.transfer.gigabytes_per_s"] == pytest.approx(6.4e-6)
    assert registry.get_sample_value("diptych_kv_pulls_total", {"transport": "inline"}) == 1
    assert registry.get_sample_value("diptych_kv_transfer_bytes_total") == 64


def test_a_fallback_is_visible(
    observer: StreamObserver,
    tracing: Tracing,
    exporter: InMemorySpanExporter,
    registry: CollectorRegistry,
) -> None:
    command, sequence = reserve()
    observer.reserved(command, sequence)
    lost = PullError(decode_pb2.PULL_FAILURE_SOURCE_LOST, "gone")
    observer.pull_failed(observer.pulling(7), lost)
    observer.pull_failed(observer.pulling(7), None)
    observer.started(decode_pb2.Start(sequence_id=7), sequence, Fallback.RECOMPUTE)
    observer.stepped([NewToken(7, 2, 5, None)])
    observer.stepped([NewToken(7, 3, 5, None)])
    tracing.shutdown()
    spans = exporter.get_finished_spans()
    assert [span.name for span in spans] == [
        "diptych.transfer",
        "diptych.transfer",
        "diptych.recompute",
    ]
    failed = "diptych_kv_pulls_failed_total"
    assert registry.get_sample_value(failed, {"reason": "SOURCE_LOST"}) == 1
    assert registry.get_sample_value(failed, {"reason": "CANCELLED"}) == 1
    assert registry.get_sample_value("diptych_local_prefills_total", {"why": "recompute"}) == 1


def test_each_span_is_part_of_what_the_router_said(
    observer: StreamObserver, tracing: Tracing, exporter: InMemorySpanExporter
) -> None:
    """The run belongs to a stage; pulls and what is computed instead, to their attempts."""
    observer.reserved(*(asked := reserve()))
    observer.bound(decode_pb2.Bind(sequence_id=7, trace_context=context(FIRST)))
    first = observer.pulling(7)
    observer.bound(decode_pb2.Bind(sequence_id=7, trace_context=context(SECOND)))
    observer.pull_failed(first, None)
    observer.pulled(observer.pulling(7), common_pb2.TransferStats(transport="inline"))
    start = decode_pb2.Start(sequence_id=7, trace_context=context(SECOND))
    observer.started(start, asked[1], Fallback.RECOMPUTE)
    observer.stepped([NewToken(7, 2, 5, None)])
    observer.ended(asked[1], decode_pb2.Ended(sequence_id=7))
    tracing.shutdown()
    cancelled, pull, exposed, recompute, run = exporter.get_finished_spans()
    parents = [
        f"{span.parent.span_id:016x}" for span in (cancelled, pull, recompute, run) if span.parent
    ]
    assert parents == [FIRST, SECOND, SECOND, RUN]
    assert exposed.parent == pull.context
    assert [f"{link.context.span_id:016x}" for link in run.links] == [SECOND]


def leases_end(observer: StreamObserver) -> Sequence:
    """The lease ends under a pull, and the source tells of it first."""
    command, sequence = reserve()
    observer.reserved(command, sequence)
    observer.bound(decode_pb2.Bind(sequence_id=7, trace_context=context(FIRST)))
    failure = decode_pb2.PULL_FAILURE_TICKET_INVALID
    error = PullError(failure, "the lease has ended", refusal="LEASE_EXPIRED")
    observer.pull_failed(observer.pulling(7), error)
    return sequence


def test_a_pull_whose_lease_ends_before_its_release_comes_was_cancelled(
    observer: StreamObserver,
    tracing: Tracing,
    exporter: InMemorySpanExporter,
    registry: CollectorRegistry,
) -> None:
    sequence = leases_end(observer)
    observer.ended(sequence, decode_pb2.Ended(sequence_id=7))
    tracing.shutdown()
    (pull,) = exporter.get_finished_spans()
    assert pull.status.description == "CANCELLED"
    failed = "diptych_kv_pulls_failed_total"
    assert registry.get_sample_value(failed, {"reason": "CANCELLED"}) == 1
    assert registry.get_sample_value(failed, {"reason": "TICKET_INVALID"}) == 0


def test_a_pull_whose_lease_ends_while_the_request_goes_on_has_failed(
    observer: StreamObserver, tracing: Tracing, exporter: InMemorySpanExporter
) -> None:
    leases_end(observer)
    observer.bound(decode_pb2.Bind(sequence_id=7, trace_context=context(SECOND)))
    tracing.shutdown()
    (pull,) = exporter.get_finished_spans()
    assert pull.status.description == "TICKET_INVALID"
    assert pull.parent is not None
    assert f"{pull.parent.span_id:016x}" == FIRST
