"""Spans go over HTTP where OpenTelemetry's own variables ask for it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from diptych.process import ProcessConfig
from diptych.service_host import ServiceHost
from diptych.telemetry.stages import Stage


class Sink(ThreadingHTTPServer):
    """Keeps what is posted to it: path, headers, body."""

    def __init__(self) -> None:
        self.posts: list[tuple[str, dict[str, str], bytes]] = []
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: Sink

    def do_POST(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = self.rfile.read(int(headers["content-length"]))
        self.server.posts.append((self.path, headers, body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on standard error."""


@contextmanager
def collecting() -> Iterator[Sink]:
    with Sink() as sink:
        thread = threading.Thread(target=sink.serve_forever)
        thread.start()
        try:
            yield sink
        finally:
            sink.shutdown()
            thread.join()


async def test_spans_are_posted_where_the_standard_variables_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with collecting() as sink:
        port = sink.server_address[1]
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=alice")
        tracing = ServiceHost(ProcessConfig()).tracing
        with tracing.span(Stage.QUEUE):
            pass
        tracing.shutdown(timeout_s=10.0)
    ((path, headers, body),) = sink.posts
    assert path == "/v1/traces"
    assert headers["content-type"] == "application/x-protobuf"
    assert headers["x-tenant"] == "alice"
    request = trace_service_pb2.ExportTraceServiceRequest.FromString(body)
    (resource,) = request.resource_spans
    (scope,) = resource.scope_spans
    assert [span.name for span in scope.spans] == [Stage.QUEUE.span_name]
