"""What is read at each scrape: its value is that of what it is about, then."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from decode_worker import pair_metrics
from diptych.process import ProcessConfig
from diptych.service_host import ServiceHost
from diptych.telemetry import logs
from diptych.telemetry.families import LeaseMetrics
from diptych.telemetry.metrics import Metrics
from diptych.telemetry.tracing import Tracing
from diptych.v1 import worker_pb2
from diptych.worker.step_metrics import StepMetrics
from prefill_worker import source_metrics
from tests import metrics


def told(register: Callable[[Metrics], object]) -> Callable[..., float | None]:
    """What a scrape says of a metric, by its name without prefix."""
    registry = CollectorRegistry()
    register(Metrics(registry))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"diptych_{name}", labels)

    return value


def test_pairs() -> None:
    counters = SimpleNamespace(
        num_pairs_failed={"KV_LAYOUT_MISMATCH": 2},
        num_transport_fallbacks=3,
        num_refetches=4,
        num_agent_teardowns=5,
    )
    way = "VRAM of device 0 at the source, DRAM at the reader, staged at the source"
    proven = worker_pb2.Pair(
        source_address="p:1",
        state=worker_pb2.PAIR_STATE_PROVEN,
        transport="staged",
        bytes_per_s=3e9,
        way=way,
    )
    lost = worker_pb2.Pair(source_address="p:2", state=worker_pb2.PAIR_STATE_FAILED)
    pairs = SimpleNamespace(
        counters=counters,
        pairs=lambda: [proven, lost],
        num_open_reads=6,
        oldest_quarantined_s=7.5,
        num_quarantined_blocks_ever=8,
    )
    value = told(lambda metrics: pair_metrics.register(metrics, cast(Any, pairs)))
    assert value("kv_pair_bytes_per_second", source="p:1", transport="staged") == 3e9
    assert value("kv_pair_way", source="p:1", way=way) == 1
    assert value("kv_pair_way", source="p:2", way="") is None
    assert value("kv_pairs_failed", reason="KV_LAYOUT_MISMATCH") == 2
    assert value("kv_transport_fallbacks") == 3
    assert value("kv_pull_refetches") == 4
    assert value("kv_agent_teardowns") == 5
    assert value("kv_reads_open") == 6
    assert value("kv_quarantine_age_seconds") == 7.5
    assert value("kv_quarantined_blocks_ever") == 8


def test_what_a_source_serves() -> None:
    counters = SimpleNamespace(num_fetches_open=2, num_confirmed=3, num_refused={}, digest_s=0.5)
    leases = SimpleNamespace(num_grants=4)

    def register(metrics: Metrics) -> None:
        source_metrics.register(metrics, cast(Any, counters), cast(Any, leases))
        LeaseMetrics(metrics, lambda: 5)

    value = told(register)
    assert value("kv_fetches_open") == 2
    assert value("kv_tickets_valid") == 4
    assert value("leases_open") == 5


def test_what_an_engine_runs() -> None:
    loads = [
        SimpleNamespace(
            blocks=SimpleNamespace(_asdict=dict),
            num_running=running,
            num_waiting=7,
            num_preemptions=preempted,
            num_lookup_tokens=0,
            num_hit_tokens=0,
            num_batch_preemptions=preempted - 1,
            num_set_aside=running + 3,
            num_sat_out=2 * running,
        )
        for running, preempted in ((0, 2), (2, 5))
    ]
    engine = SimpleNamespace(last_step=None, load=lambda: loads[0])
    made: list[StepMetrics] = []
    parts: Any = SimpleNamespace(engine=engine)
    value = told(lambda metrics: made.append(StepMetrics(metrics, parts)))
    engine.load = lambda: loads[1]
    made[0].book()
    assert value("sequences_running") == 2
    assert value("sequences_waiting") == 7
    assert value("preemptions_total") == 3
    assert value("sequences_yielded_total", what="blocks") == 3
    assert value("sequences_yielded_total", what="place") == 2
    assert value("sequences_yielded_total", what="step") == 4


@pytest.mark.parametrize(
    ("name", "held"),
    [
        ("log_lines_dropped", None),
        ("trace_spans_held", "num_held"),
        ("trace_spans_forgotten", "num_forgotten"),
    ],
)
async def test_what_every_process_holds_back_or_drops(
    monkeypatch: pytest.MonkeyPatch, name: str, held: str | None
) -> None:
    if held is None:
        monkeypatch.setattr(logs, "num_dropped_lines", lambda: 9)
    else:
        monkeypatch.setattr(Tracing, held, 9)
    async with ServiceHost(ProcessConfig()) as host:
        assert host.registry.get_sample_value(f"diptych_{name}") == 9


@pytest.mark.parametrize(
    ("test", "is_moved"),
    [
        ('assert told["diptych_pulls"] == 1', True),
        ('assert told["diptych_pulls_total"] == 0.5', True),
        ("assert told['diptych_pulls_total{why=\"a\"}'] == 0", True),  # beside others of it
        ('assert server.metric("diptych_pulls") >= 1', True),
        ('assert told["diptych_pulls"] == 0', False),
        ('assert told["diptych_pulls"] == 0.0', False),
        ('assert (told["diptych_pulls"]) == 0', False),
        ('assert server.metric("diptych_pulls") == 0', False),
        ('assert server.metric(\n    "diptych_pulls"\n) == 0', False),
        ('assert told["diptych_pulls_failed"] == 1', False),
    ],
)
def test_a_metric_that_is_only_found_at_0_is_moved_by_no_test(test: str, is_moved: bool) -> None:
    assert metrics.is_asserted("pulls", test) is is_moved


def test_the_metrics_of_every_role_are_looked_for() -> None:
    """One of each package that makes some. In one string: else this would seem to assert them."""
    each = "batches_open trace_spans_sent retries engine_step_seconds kv_exposed_seconds"
    assert {*each.split()} <= metrics.made_in_code()
