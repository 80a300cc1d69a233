"""What requests are counted by."""

from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from diptych.errors import all_reasons
from diptych.telemetry.metrics import Metrics
from diptych.telemetry.tracing import Tracing
from router.generation.answer import KVPath, Timing, Transfer, Usage
from router.request.response_builder import Moments
from router.telemetry import OUTCOMES, RequestObserver, RouterMetrics

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
    ended_s=6.0,
)


def test_each_reason_of_an_error_is_an_outcome() -> None:
    assert set(OUTCOMES) == {"ok", "cancelled", *all_reasons()}
    assert {"QUEUE_FULL", "STEP_FAILED"} <= set(OUTCOMES)


def test_a_request_that_passes_every_stage_is_seen_in_every_label() -> None:
    registry, room = CollectorRegistry(), SimpleNamespace(num_waiting=0, num_placed=0)
    metrics = RouterMetrics(Metrics(registry), room, lambda: 0.0, lambda: (1, 1))
    observer = RequestObserver(
        metrics,
        Tracing("test"),
        "r",
        operation="chat",
        model="m",
        metadata=(),
        received_s=0.0,
    )
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
    registry, room = CollectorRegistry(), SimpleNamespace(num_waiting=0, num_placed=0)
    metrics = RouterMetrics(Metrics(registry), room, lambda: 0.0, lambda: (1, 1))
    usage = Usage(num_prompt_tokens=1, num_output_tokens=3, num_cached_tokens=0)
    for outcome in ("ok", "cancelled", "STEP_FAILED", "no such reason"):
        observer = RequestObserver(
            metrics,
            Tracing("test"),
            "r",
            operation="chat",
            model="m",
            metadata=(),
            received_s=0.0,
        )
        observer.ended(outcome, MOMENTS, usage, Timing(ttft_s=3.0, total_s=4.0))
    common = {
        "gen_ai_operation_name": "chat",
        "gen_ai_provider_name": "diptych",
        "gen_ai_request_model": "m",
    }

    def count(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"gen_ai_server_{name}_seconds_count", common | labels)

    assert count("time_to_first_token") == 4
    assert count("time_per_output_token") == 4
    assert count("request_duration", error_type="") == 2
    assert count("request_duration", error_type="STEP_FAILED") == 1
    assert count("request_duration", error_type="INTERNAL") == 1
