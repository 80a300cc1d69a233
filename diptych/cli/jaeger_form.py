"""Traces as Jaeger's own JSON has them, which its user interface reads from a file."""

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import TypeAlias

from diptych.cli.recorded_spans import RecordedSpan, Tags, Value
from diptych.cli.trace_tree import Trace

Json: TypeAlias = "bool | int | float | str | list[Json] | Mapping[str, Json] | None"

_KINDS = ("unspecified", "internal", "server", "client", "producer", "consumer")


def jaeger_form(traces: Iterable[Trace]) -> Json:
    """What is written to the file. Times are µs there."""
    return {"data": [_trace(trace) for trace in traces]}


def _trace(trace: Trace) -> Json:
    processes: dict[str, str] = {}  # ids, by service and instance
    described: dict[str, Json] = {}
    spans: list[Json] = []
    for span, _ in trace.rows:
        instance = f"{span.service} {span.process_tags.get('service.instance.id', '')}"
        process_id = processes.setdefault(instance, f"p{len(processes) + 1}")
        others = {k: v for k, v in span.process_tags.items() if k != "service.name"}
        described[process_id] = {"serviceName": span.service, "tags": _tags(others)}
        spans.append(_span(span, process_id))
    return {
        "traceID": trace.trace_id,
        "spans": spans,
        "processes": described,
        "warnings": None,
    }


def _span(span: RecordedSpan, process_id: str) -> Json:
    references: list[Json] = []
    if span.parent_id:
        references.append(_reference("CHILD_OF", span.trace_id, span.parent_id))
    references += [_reference("FOLLOWS_FROM", link.trace_id, link.span_id) for link in span.links]
    marks: Tags = {"span.kind": _KINDS[span.kind] if span.kind < len(_KINDS) else "unspecified"}
    if span.error is not None:
        marks |= {"error": True, "otel.status_description": span.error}
    logs: list[Json] = [
        {"timestamp": event.at_ns // 1000, "fields": _tags({"event": event.name, **event.tags})}
        for event in span.events
    ]
    return {
        "traceID": span.trace_id,
        "spanID": span.span_id,
        "operationName": span.name,
        "references": references,
        "startTime": span.start_ns // 1000,
        "duration": max(0, span.end_ns - span.start_ns) // 1000,
        "tags": _tags({**span.tags, **marks}),
        "logs": logs,
        "processID": process_id,
        "warnings": None,
    }


def _reference(kind: str, trace_id: str, span_id: str) -> Json:
    return {"refType": kind, "traceID": trace_id, "spanID": span_id}


def _tags(tags: Tags) -> Json:
    return [_tag(key, value) for key, value in tags.items()]


def _tag(key: str, value: Value) -> Json:
    if isinstance(value, bool):
        return {"key": key, "type": "bool", "value": value}
    if isinstance(value, int):
        return {"key": key, "type": "int64", "value": value}
    if isinstance(value, float) and isfinite(value):  # JSON has no others
        return {"key": key, "type": "float64", "value": value}
    return {"key": key, "type": "string", "value": value if isinstance(value, str) else str(value)}
