"""Makes Grafana's dashboard of the cluster. ``make manifests`` writes it."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.unit.deploy.chart import CHART
from tests.unit.deploy.values_schema import Json

PATH: Path = CHART / "dashboards" / "diptych.json"
RATE = "[$__rate_interval]"
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 24


class Query(NamedTuple):
    """One expression, and what each of its lines is called."""

    expr: str
    legend: str


class Panel(NamedTuple):
    """One graph."""

    title: str
    unit: str  # as Grafana names it
    queries: Sequence[Query]
    is_stacked: bool = False


def quantiles(metric: str, *wanted: float, by: str = "") -> list[Query]:
    """Of a histogram, over all that tell it; or by a label."""
    labels = f"le, {by}" if by else "le"
    buckets = f"sum by ({labels}) (rate({metric}_bucket{RATE}))"
    name = f"{{{{{by}}}}} " if by else ""
    return [Query(f"histogram_quantile({q:g}, {buckets})", f"{name}P{100 * q:g}") for q in wanted]


def rates(metric: str, by: str) -> list[Query]:
    """Of a counter, by a label."""
    return [Query(f"sum by ({by}) (rate({metric}{RATE}))", f"{{{{{by}}}}}")]


def levels(metric: str, by: str) -> list[Query]:
    """Of a gauge, by a label."""
    return [Query(f"sum by ({by}) ({metric})", f"{{{{{by}}}}}")]


ROWS: dict[str, list[Panel]] = {
    "Requests": [
        Panel("Requests ended", "reqps", rates("diptych_requests_total", "outcome"), True),
        Panel(
            "Time to first token",
            "s",
            quantiles("gen_ai_server_time_to_first_token_seconds", 0.5, 0.95, 0.99),
        ),
        Panel(
            "Time between tokens, as clients took them",
            "s",
            quantiles("diptych_inter_token_latency_seconds", 0.5, 0.99),
        ),
        Panel(
            "Where the time goes, on average",
            "s",
            [
                Query(
                    f"sum by (stage) (rate(diptych_request_stage_seconds_sum{RATE})) / "
                    f"sum by (stage) (rate(diptych_request_stage_seconds_count{RATE}))",
                    "{{stage}}",
                )
            ],
            True,
        ),
        Panel(
            "In the router",
            "short",
            [
                Query("sum(diptych_router_requests_waiting)", "waiting"),
                Query("sum(diptych_router_requests_placed)", "on workers"),
            ],
        ),
        Panel(
            "Waiting, by class", "short", levels("diptych_router_class_requests_waiting", "class")
        ),
        Panel(
            "Seconds of engines, by class",
            "short",
            rates("diptych_router_class_engine_seconds_total", "class"),
            True,
        ),
        Panel(
            "Refused, as objectives would be missed",
            "reqps",
            rates("diptych_router_unreachable_total", "class"),
            True,
        ),
        Panel("Recovery", "ops", rates("diptych_retries_total", "action"), True),
    ],
    "Tenants": [
        Panel(
            "Requests ended, by tenant",
            "reqps",
            [
                Query(
                    f"sum by (tenant, ending) (rate(diptych_tenant_requests_total{RATE}))",
                    "{{tenant}} {{ending}}",
                )
            ],
            True,
        ),
        Panel(
            "Tokens of prompts, by tenant",
            "short",
            rates("diptych_tenant_input_tokens_total", "tenant"),
            True,
        ),
        Panel(
            "Tokens sent, by tenant",
            "short",
            rates("diptych_tenant_output_tokens_total", "tenant"),
            True,
        ),
        Panel(
            "Prompt tokens found in prefix caches, by tenant",
            "percentunit",
            [
                Query(
                    f"sum by (tenant) (rate(diptych_tenant_cached_tokens_total{RATE})) / "
                    f"sum by (tenant) (rate(diptych_tenant_input_tokens_total{RATE}))",
                    "{{tenant}}",
                )
            ],
        ),
        Panel(
            "Waiting for a placement, per request of a tenant",
            "s",
            [
                Query(
                    f"sum by (tenant) (rate(diptych_tenant_queue_seconds_total{RATE})) / "
                    f"sum by (tenant) (rate(diptych_tenant_requests_total{RATE}))",
                    "{{tenant}}",
                )
            ],
        ),
    ],
    "Hand-off": [
        Panel(
            "How KV came to be where it was needed",
            "reqps",
            rates("diptych_requests_by_kv_path_total", "kv_path"),
            True,
        ),
        Panel(
            "From the first to the second token",
            "s",
            quantiles("diptych_handoff_gap_seconds", 0.5, 0.95),
        ),
        Panel(
            "Transfer that prefill does not hide",
            "s",
            quantiles("diptych_kv_exposed_seconds", 0.5, 0.95),
        ),
        Panel(
            "KV moved",
            "Bps",
            [
                Query(
                    f"sum by (instance) (rate(diptych_kv_transfer_bytes_total{RATE}))",
                    "{{instance}}",
                )
            ],
        ),
        Panel("Pulls that failed", "ops", rates("diptych_kv_pulls_failed_total", "reason"), True),
        Panel(
            "Alarms: KV that was not what was announced, blocks that do not add up",
            "short",
            [
                Query("sum(increase(diptych_kv_unproven_total[1h]))", "unproven, in an hour"),
                Query(
                    "sum(increase(diptych_kv_block_mismatches_total[1h]))", "mismatches, in an hour"
                ),
            ],
        ),
    ],
    "Workers": [
        Panel("Tokens computed", "ops", rates("diptych_engine_tokens_total", "phase"), True),
        Panel("Blocks by owner", "short", levels("diptych_kv_blocks", "owner"), True),
        Panel(
            "Sequences",
            "short",
            [
                Query("sum by (instance) (diptych_sequences_running)", "{{instance}} running"),
                Query("sum by (instance) (diptych_sequences_waiting)", "{{instance}} waiting"),
            ],
        ),
        Panel("One step", "s", quantiles("diptych_engine_step_seconds", 0.5, by="instance")),
        Panel(
            "Prompt tokens found in prefix caches",
            "percentunit",
            [
                Query(
                    f"sum(rate(diptych_prefix_cache_hit_tokens_total{RATE})) / "
                    f"sum(rate(diptych_prefix_cache_lookup_tokens_total{RATE}))",
                    "share",
                )
            ],
        ),
        Panel(
            "How late event loops are",
            "s",
            quantiles("diptych_event_loop_lag_seconds", 0.99, by="instance"),
        ),
    ],
}


def metric_names(expr: str) -> set[str]:
    """The series that an expression asks for."""
    return set(re.findall(r"\b(?:diptych|gen_ai)_[a-z_]+", expr))


def scoped(expr: str) -> str:
    """Of the namespaces that are chosen above the panels; all of them where there are none."""
    return re.sub(r"\b((?:diptych|gen_ai)_[a-z_]+)", r'\1{namespace=~"$namespace"}', expr)


def expressions() -> list[str]:
    """Of every panel."""
    return [query.expr for row in ROWS.values() for panel in row for query in panel.queries]


def dashboard() -> dict[str, Json]:
    """The whole of it."""
    panels: list[Json] = []
    top = 0
    for title, row in ROWS.items():
        place: Json = {"x": 0, "y": top, "w": _COLUMNS, "h": 1}
        panels.append({"type": "row", "title": title, "id": len(panels) + 1, "gridPos": place})
        top += 1
        for index, panel in enumerate(row):
            x, line = index * _WIDTH % _COLUMNS, index * _WIDTH // _COLUMNS
            place = {"x": x, "y": top + line * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
            panels.append({**_graph(panel), "id": len(panels) + 1, "gridPos": place})
        top += -(-len(row) * _WIDTH // _COLUMNS) * _HEIGHT
    source: Json = {
        "name": "source",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
    }
    namespace: Json = {
        "name": "namespace",
        "label": "Namespace",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "query": "label_values(diptych_router_requests_waiting, namespace)",
        "refresh": 2,  # when the time range changes
        "multi": True,
        "includeAll": True,
        "allValue": ".*",  # also what has no such label, outside Kubernetes
        "current": {"text": "All", "value": "$__all"},
    }
    return {
        "title": "Diptych",
        "uid": "diptych",
        "tags": ["diptych"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [source, namespace]},
        "panels": panels,
    }


def dashboard_text() -> str:
    """As the file has it."""
    return json.dumps(dashboard(), indent=1) + "\n"


def _graph(panel: Panel) -> dict[str, Json]:
    stacking: Json = {"mode": "normal" if panel.is_stacked else "none"}
    custom: Json = {"stacking": stacking, "fillOpacity": 30 if panel.is_stacked else 0}
    targets: list[Json] = [
        {"refId": chr(ord("A") + index), "expr": scoped(query.expr), "legendFormat": query.legend}
        for index, query in enumerate(panel.queries)
    ]
    return {
        "type": "timeseries",
        "title": panel.title,
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": custom},
            "overrides": [],
        },
        "targets": targets,
    }
