"""What single tenants took: counted by name for a bounded number of them, and for nobody else."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from diptych.errors import (
    DeadlineUnreachableError,
    QueueFullError,
    QuotaExceededError,
    StepFailedError,
    reasons_with,
)
from diptych.telemetry.metrics import Metrics
from router.generation.answer import Timing, Usage
from router.tenant_metrics import TenantMetrics
from tests import metrics
from tests.unit.router.test_telemetry import MOMENTS, make_metrics, make_observer

USAGE = Usage(num_prompt_tokens=10, num_output_tokens=7, num_cached_tokens=4, num_resumed_tokens=2)


def told(registry: CollectorRegistry) -> dict[str, float]:
    """What is said of single tenants."""
    samples = metrics.parse(generate_latest(registry).decode())
    return {key: value for key, value in samples.items() if key.startswith("diptych_tenant_")}


def without_moments(samples: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in samples.items() if "_created{" not in key}


def test_output_tokens_are_said_to_be_those_made_which_best_of_does_not_all_tell() -> None:
    registry = CollectorRegistry()
    TenantMetrics(Metrics(registry), max_tenants=1)
    text = generate_latest(registry).decode()
    assert "# HELP diptych_tenant_output_tokens_total Output tokens made for a tenant's" in text


def test_all_that_a_request_took_is_its_tenants() -> None:
    registry = CollectorRegistry()
    observer = make_observer(make_metrics(registry), tenant="alice")
    observer.ended("ok", MOMENTS, USAGE, Timing(ttft_s=3.0))
    assert without_moments(told(registry)) == {
        'diptych_tenant_requests_total{ending="ok",tenant="alice"}': 1,
        'diptych_tenant_input_tokens_total{tenant="alice"}': 10,
        'diptych_tenant_cached_tokens_total{tenant="alice"}': 4,
        'diptych_tenant_output_tokens_total{tenant="alice"}': 5,
        'diptych_tenant_queue_seconds_total{tenant="alice"}': 1.0,
    }


@pytest.mark.parametrize(
    ("outcome", "ending"),
    [
        ("cancelled", "cancelled"),
        (QuotaExceededError.reason, "refused"),
        (QueueFullError.reason, "refused"),
        (DeadlineUnreachableError.reason, "refused"),
        (StepFailedError.reason, "failed"),
        ("REQUEST_INVALID", "failed"),
        ("no such reason", "failed"),
    ],
)
def test_a_request_that_came_to_nothing_is_counted_by_how_it_ended(
    outcome: str, ending: str
) -> None:
    registry = CollectorRegistry()
    make_observer(make_metrics(registry), tenant="alice").ended(outcome)
    (counted,) = without_moments(told(registry))
    assert counted == f'diptych_tenant_requests_total{{ending="{ending}",tenant="alice"}}'


def test_nobody_is_no_tenant() -> None:
    registry = CollectorRegistry()
    make_observer(make_metrics(registry)).ended("ok", MOMENTS, USAGE, Timing(ttft_s=3.0))
    make_observer(make_metrics(CollectorRegistry())).ended("INVALID_API_KEY")
    assert told(registry) == {}


def test_who_comes_when_all_series_are_taken_is_counted_among_the_others() -> None:
    registry = CollectorRegistry()
    tenants = TenantMetrics(Metrics(registry), max_tenants=2)
    for name in ("a", "b", "c", "other", "d", "a"):
        tenants.ended(name, "ok", USAGE, 0.5)
    name = "diptych_tenant_output_tokens_total"
    counts = {key: value for key, value in told(registry).items() if key.startswith(name)}
    assert counts == {
        f'{name}{{tenant="a"}}': 10,
        f'{name}{{tenant="b"}}': 5,
        f'{name}{{tenant="other"}}': 15,
    }


def test_where_no_tenant_is_told_of_none_is_counted() -> None:
    registry = CollectorRegistry()
    TenantMetrics(Metrics(registry), max_tenants=0).ended("a", "ok", USAGE, 0.5)
    assert told(registry) == {}


def test_refusals_are_those_that_say_come_back_later() -> None:
    refusals = reasons_with(QuotaExceededError.code)
    assert {"QUOTA_EXCEEDED", "QUEUE_FULL", "QUEUE_TIMEOUT", "DEADLINE_UNREACHABLE"} <= refusals
    assert not {"STEP_FAILED", "REQUEST_INVALID", "INTERNAL"} & refusals
