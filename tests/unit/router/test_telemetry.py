"""What requests are counted by."""

from dataclasses import replace
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, generate_latest

from diptych.errors import (
    DeadlineUnreachableError,
    QueueFullError,
    TransferInterruptedError,
)
from diptych.request_class import RequestClass
from diptych.sampling_params import SamplingParams
from diptych.telemetry import attributes
from diptych.telemetry.metrics import Metrics
from diptych.telemetry.sampling import Sampling
from diptych.telemetry.stages import Stage
from diptych.telemetry.tracing import Tracing
from router.frontend.generator import Generator
from router.generation.answer import KVPath, Timing, Transfer, Usage
from router.metrics import RouterMetrics
from router.placement.claim import Claim
from router.placement.explanation import Explanation
from router.placement.placement import Forecast, Outlook, Paired
from router.placement.views import WorkerId
from router.request.actions import Retry
from router.request.observer import Waits
from router.request.response_builder import Moments
from router.telemetry import RequestObserver, Telemetry
from router.tenant_metrics import TenantMetrics
from router.trace import RequestTrace
from tests.unit.router.told_workers import ToldWorkers

TRANSFER = Transfer(
    transport="inline",
    num_bytes=1,
    num_tokens=1,
    read_s=1.0,
    exposed_s=1.0,
    total_s=1.0,
    digest_s=0.0,
)
MOMENTS = Moments(
    received_s=0.0,
    placed_s=1.0,
    first_token_s=2.0,
    last_token_s=5.0,
    first_written_s=3.0,
    second_written_s=4.0,
    last_written_s=5.0,
)


def make_metrics(registry: CollectorRegistry) -> RouterMetrics:
    return RouterMetrics(Metrics(registry), TenantMetrics(Metrics(registry), max_tenants=2))


def make_observer(
    metrics: RouterMetrics,
    trace: Tracing | None = None,
    slow_s: float | None = None,
    tenant: str = "",
) -> RequestObserver:
    spans = trace or Tracing("test")
    telemetry = Telemetry(metrics, spans, ToldWorkers(), "m", slow_s)
    return RequestObserver(telemetry, "r", operation="chat", metadata=(), tenant=tenant)


GEN_AI_LABELS = {
    "gen_ai_operation_name": "chat",
    "gen_ai_provider_name": "diptych",
    "gen_ai_request_model": "m",
}


NOT_SAMPLED = Sampling(0.0, caller_per_s=0.0, holds=True)
CAUSE = TransferInterruptedError("x")


@pytest.mark.parametrize(
    ("story", "is_kept"),
    [
        ({}, False),
        ({"outcome": "cancelled"}, False),
        ({"outcome": "STEP_FAILED"}, True),
        ({"outcome": "QUEUE_FULL"}, True),
        ({"outcome": "INVALID_API_KEY"}, False),  # whoever calls could have all traced
        ({"is_retried": True}, True),
        ({"gaps_s": (None, 0.1)}, False),
        ({"gaps_s": (None, 5.0, 0.1)}, True),
        ({"received_before_s": 6.0, "gaps_s": (None,)}, True),
        ({"received_before_s": 6.0, "outcome": "cancelled"}, True),
    ],
)
def test_what_went_wrong_or_was_slow_is_traced_though_it_was_not_sampled(
    story: dict[str, Any], is_kept: bool
) -> None:
    exporter = InMemorySpanExporter()
    trace = Tracing("test", exporter=exporter, sampled=NOT_SAMPLED)
    observer = make_observer(make_metrics(CollectorRegistry()), trace, slow_s=5.0)
    observer.received_s -= story.get("received_before_s", 0.0)
    for gap_s in story.get("gaps_s", ()):
        observer.emitted(1, gap_s)
    if story.get("is_retried"):
        observer.retried(Retry.REBIND, CAUSE, Stage.PREFILL)
    observer.ended(story.get("outcome", "ok"))
    trace.shutdown()
    assert bool(exporter.get_finished_spans()) == is_kept
    assert trace.num_held == 0


def test_who_is_not_let_in_is_counted_and_not_traced() -> None:
    registry, exporter = CollectorRegistry(), InMemorySpanExporter()
    trace = Tracing("test", exporter=exporter)
    telemetry = Telemetry(make_metrics(registry), trace, ToldWorkers(), "m", None)
    nothing: Any = None
    generator = Generator(nothing, nothing, nothing, telemetry, nothing)
    asked = (("traceparent", f"00-{'a' * 32}-{'b' * 16}-01"),)
    for reason in ("INVALID_API_KEY", "REQUEST_INVALID"):
        generator.refused(reason, asked)
        counted = registry.get_sample_value("diptych_requests_total", {"outcome": reason})
        assert counted == 1.0
    trace.shutdown()
    (span,) = exporter.get_finished_spans()
    assert (span.attributes or {})["error.type"] == "REQUEST_INVALID"


def test_a_request_that_passes_every_stage_is_seen_in_every_label() -> None:
    registry = CollectorRegistry()
    observer = make_observer(make_metrics(registry))
    usage = Usage(num_prompt_tokens=1, num_output_tokens=3, num_cached_tokens=0)
    timing = Timing(ttft_s=3.0, kv_path=KVPath.DISAGGREGATED, transfer=TRANSFER)
    observer.ended("ok", MOMENTS, usage, timing)
    name = "diptych_request_stage_seconds_count"
    counts: dict[str, Any] = {
        line.split()[0]: float(line.split()[1])
        for line in generate_latest(registry).decode().splitlines()
        if line.startswith(name)
    }
    assert len(counts) == 7
    assert set(counts.values()) == {1.0}, counts


def test_what_genai_conventions_define_has_their_attributes() -> None:
    registry = CollectorRegistry()
    metrics = make_metrics(registry)
    usage = Usage(num_prompt_tokens=1, num_output_tokens=3, num_cached_tokens=0)
    for outcome in ("ok", "cancelled", "STEP_FAILED", "no such reason"):
        make_observer(metrics).ended(outcome, MOMENTS, usage, Timing(ttft_s=3.0, total_s=4.0))

    def count(name: str, **labels: str) -> float | None:
        name = f"gen_ai_server_{name}_seconds_count"
        return registry.get_sample_value(name, GEN_AI_LABELS | labels)

    assert count("time_to_first_token") == 4
    assert count("time_per_output_token") == 4
    assert count("request_duration", error_type="") == 2
    assert count("request_duration", error_type="STEP_FAILED") == 1
    assert count("request_duration", error_type="INTERNAL") == 1


def test_a_request_that_was_refused_has_its_duration() -> None:
    registry = CollectorRegistry()
    make_observer(make_metrics(registry)).ended("QUEUE_FULL")
    labels = GEN_AI_LABELS | {"error_type": "QUEUE_FULL"}
    name = "gen_ai_server_request_duration_seconds_count"
    assert registry.get_sample_value(name, labels) == 1


@pytest.mark.parametrize(("num_new", "tpot_s"), [(0, None), (1, None), (2, 2.0), (5, 0.5)])
def test_tokens_that_the_client_had_already_are_in_no_average(
    num_new: int, tpot_s: float | None
) -> None:
    registry = CollectorRegistry()
    usage = Usage(
        num_prompt_tokens=1,
        num_output_tokens=7 + num_new,
        num_cached_tokens=0,
        num_resumed_tokens=7,
    )
    timing = Timing(handoff_gap_s=1.5, decode_s=0.5)
    moments = MOMENTS if num_new > 1 else replace(MOMENTS, second_written_s=None)
    make_observer(make_metrics(registry)).ended("ok", moments, usage, timing)
    tpot = "gen_ai_server_time_per_output_token_seconds"
    assert registry.get_sample_value(f"{tpot}_sum", GEN_AI_LABELS) == tpot_s
    gaps = registry.get_sample_value("diptych_handoff_gap_seconds_count")
    assert gaps == (0 if tpot_s is None else 1)
    assert registry.get_sample_value("diptych_output_tokens_total") == num_new


def test_the_pace_is_that_of_the_first_of_several_choices() -> None:
    registry = CollectorRegistry()
    usage = Usage(num_prompt_tokens=1, num_output_tokens=12, num_cached_tokens=0)
    timing = Timing(handoff_gap_s=1.5, decode_s=0.5)
    observer = make_observer(make_metrics(registry))
    observer.ended("ok", MOMENTS, usage, timing, num_other_tokens=7)
    tpot = "gen_ai_server_time_per_output_token_seconds_sum"
    assert registry.get_sample_value(tpot, GEN_AI_LABELS) == 0.5
    assert registry.get_sample_value("diptych_output_tokens_total") == 12


def test_an_answer_that_broke_off_before_its_second_token_was_written_has_no_pace() -> None:
    """However many tokens had come from the worker."""
    registry = CollectorRegistry()
    usage = Usage(num_prompt_tokens=1, num_output_tokens=3, num_cached_tokens=0)
    moments = replace(MOMENTS, second_written_s=None)
    make_observer(make_metrics(registry)).ended("cancelled", moments, usage, Timing(ttft_s=3.0))
    assert registry.get_sample_value("diptych_handoff_gap_seconds_count") == 0


def test_each_token_but_the_first_has_one_gap_and_those_that_came_together_none_between() -> None:
    registry = CollectorRegistry()
    observer = make_observer(make_metrics(registry))
    for tell in (observer.emitted, observer.written):
        tell(1, None)
        tell(3, 0.5)
        tell(1, 0.25)
    for name in ("latency", "emission"):
        family = f"diptych_inter_token_{name}_seconds"
        assert registry.get_sample_value(f"{family}_count") == 4
        assert registry.get_sample_value(f"{family}_sum") == 0.75
        assert registry.get_sample_value(f"{family}_bucket", {"le": "0.001"}) == 2
        assert registry.get_sample_value(f"{family}_bucket", {"le": "0.25"}) == 3


@pytest.mark.parametrize("num_attempts", [1, 2])
def test_what_was_foretold_of_a_first_token_is_compared_with_what_came_true(
    num_attempts: int,
) -> None:
    """Not where another attempt brought it: that was not foretold."""
    registry = CollectorRegistry()
    observer = make_observer(make_metrics(registry))
    chosen = Outlook(WorkerId("p:1", "p"), WorkerId("d:1", "d"), 0.8, 0.05, 0.0, 9.0)
    observer.foretold(Forecast(chosen, (chosen,)))
    usage = Usage(num_prompt_tokens=1, num_output_tokens=3, num_cached_tokens=0)
    timing = Timing(ttft_s=3.0, kv_path=KVPath.DISAGGREGATED, num_attempts=num_attempts)
    observer.ended("ok", MOMENTS, usage, timing)
    taken_s, waited_s = 1.0, 1.0  # from its placement on, and before
    ratios = {
        "diptych_router_ttft_foretold_ratio": taken_s / 0.8,
        "diptych_router_ttft_foretold_whole_ratio": (waited_s + taken_s) / (waited_s + 0.8),
    }
    for name, ratio in ratios.items():
        assert registry.get_sample_value(f"{name}_count") == (num_attempts == 1)
        told = registry.get_sample_value(f"{name}_sum")
        assert told == pytest.approx(ratio if num_attempts == 1 else 0)


def test_a_first_token_that_was_foretold_at_once_leaves_its_record_and_no_ratio() -> None:
    registry = CollectorRegistry()
    observer = make_observer(make_metrics(registry))
    chosen = Outlook(WorkerId("p:1", "p"), WorkerId("d:1", "d"), 0.0, 0.05, 0.0, 9.0)
    observer.foretold(Forecast(chosen, (chosen,)))
    usage = Usage(num_prompt_tokens=1, num_output_tokens=3, num_cached_tokens=0)
    observer.ended("ok", MOMENTS, usage, Timing(ttft_s=3.0, kv_path=KVPath.DISAGGREGATED))
    assert registry.get_sample_value("diptych_router_ttft_foretold_ratio_count") == 0
    assert registry.get_sample_value("diptych_router_ttft_foretold_whole_ratio_count") == 0
    assert registry.get_sample_value("diptych_output_tokens_total") == 3


def test_an_attempt_tells_what_was_foretold_of_its_candidates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    observer = make_observer(make_metrics(CollectorRegistry()))
    chosen: dict[str, object] = {}
    monkeypatch.setattr(RequestTrace, "choose", lambda trace, marks: chosen.update(marks))
    prefill, decode = WorkerId("p:1", "p"), WorkerId("d:1", "d")
    pair = Outlook(prefill, decode, 0.8, 0.05, 0.25, 9.0)
    alone = Outlook(None, decode, 1.5, 0.05, 1.0, 9.5)
    why = Explanation((), (), 0, 0)
    observer.placed(Paired(prefill, decode, Forecast(pair, (pair, alone))), why)
    assert chosen[attributes.FORETOLD_TTFT] == 0.8
    assert chosen[attributes.FORETOLD_CANDIDATES] == [
        "p:1 d:1 ttft_s=0.800 tpot_s=0.0500 missed=0.25 seconds=9.00",
        "d:1 ttft_s=1.500 tpot_s=0.0500 missed=1.00 seconds=9.50",
    ]
    chosen.clear()
    observer.placed(Paired(prefill, decode), why)
    assert not any("foretold" in name for name in chosen)


def test_who_is_refused_by_what_is_foretold_is_counted_by_class_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry = CollectorRegistry()
    metrics = make_metrics(registry)
    said: dict[str, object] = {}
    monkeypatch.setattr(RequestTrace, "mark", lambda trace, marks: said.update(marks))
    observer = make_observer(metrics)
    observer.resolved(SamplingParams(), 5, Claim(RequestClass.BATCH))
    assert said[attributes.REQUEST_CLASS] == "batch"
    observer.waits(Waits.TURN)
    observer.waits(Waits.OBJECTIVES)
    assert said[attributes.WAITED_FOR] == "objectives"
    observer.failed(QueueFullError("full"))
    assert attributes.REFUSED_BECAUSE not in said
    observer.failed(DeadlineUnreachableError("foretold in 9 s", retry_after_s=None))
    assert said[attributes.REFUSED_BECAUSE] == "foretold in 9 s"
    metrics.engine_used(RequestClass.REALTIME, 2.5)

    def count(name: str, which: str) -> float | None:
        return registry.get_sample_value(name, {"class": which})

    refused = [count("diptych_router_unreachable_total", each) for each in RequestClass]
    assert refused == [0.0, 0.0, 1.0]
    assert count("diptych_router_class_engine_seconds_total", "realtime") == 2.5
