"""Spans go over gRPC with the headers that OpenTelemetry's own variables name, and are counted."""

import asyncio

import grpc
import pytest
from prometheus_client import generate_latest

from diptych.process import ProcessConfig
from diptych.rpc.server import Context
from diptych.service_host import ServiceHost
from diptych.telemetry.stages import Stage
from tests import metrics
from tests.trace_collector import Collector, collecting


class Guarded(Collector):
    """Takes spans of one tenant alone."""

    async def export(self, request: bytes, context: Context) -> bytes:
        if ("x-tenant", "alice") not in (context.invocation_metadata() or ()):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "not alice")
        return await super().export(request, context)


@pytest.mark.parametrize(("tenant", "num_sent"), [("alice", 1), ("mallory", 0)])
async def test_headers_of_the_standard_variables_are_sent(
    monkeypatch: pytest.MonkeyPatch, tenant: str, num_sent: int
) -> None:
    async with collecting(Guarded()) as (collector, endpoint):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"x-tenant={tenant}")
        async with ServiceHost(ProcessConfig()) as host:
            with host.tracing.span(Stage.QUEUE):
                pass
            await asyncio.to_thread(host.tracing.shutdown, 10.0)
            told = metrics.parse(generate_latest(host.registry).decode())
    assert len(collector.spans) == num_sent
    assert told["diptych_trace_spans_sent"] == num_sent
    assert told["diptych_trace_spans_unsent"] == 1 - num_sent
