"""Where processes under test send their spans by OTLP, and what can be asked of them then."""

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from diptych.telemetry import attributes
from tests.waiting import until

CLIENT_SPAN = bytes.fromhex("eee19b7ec3c1b174")
_IDS = ("traceId", "spanId", "parentSpanId")


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what arrives by OTLP: (service, span) pairs."""

    spans: list[tuple[str, Any]] = field(default_factory=list)
    exports: list[Any] = field(default_factory=list)  # as they came

    async def Export(self, request: Any, context: Any) -> Any:
        self.exports.append(request)
        for resource in request.resource_spans:
            marks = {a.key: a.value.string_value for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [(marks["service.name"], span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def json_lines(self) -> list[str]:
        """What a collector's file exporter would have written."""
        return [
            json.dumps(_with_hex_ids(MessageToDict(export, use_integers_for_enums=True)))
            for export in self.exports
        ]

    def senders(self, trace_id: str) -> set[str]:
        """Which services sent spans of it."""
        return {service for service, span in self.spans if span.trace_id.hex() == trace_id}

    def trace(self, trace_id: str) -> dict[str, Any]:
        """Its spans by their path from the one root, ``prefill/attempt 1/transfer``; of equal
        ones the second has a mark. A path of one whose parent is missing begins with ``?``,
        that of an attempt after a pull that failed with ``later``: it may have failed before
        the first token or after it.
        """
        spans = [span for _, span in self.spans if span.trace_id.hex() == trace_id]
        by_id, found = {span.span_id: span for span in spans}, {}
        for span in sorted(spans, key=lambda span: span.start_time_unix_nano):
            path = self._path(span, by_id)
            found[path if path not in found else f"{path} again"] = span
        return found

    def _path(self, span: Any, by_id: dict[bytes, Any]) -> str:
        if span.parent_span_id == CLIENT_SPAN:
            return ""
        above = by_id.get(span.parent_span_id)
        path = "?" if above is None else self._path(above, by_id)
        name = span.name.removeprefix("diptych.")
        if name == "attempt":
            number = marks_of(span)[attributes.ATTEMPT].int_value
            name = f"{name} {number}"
            if number > 1 and path in ("prefill", "handoff"):
                path = "later"
        return f"{path}/{name}" if path else name

    async def whole(self, trace_id: str, paths: set[str]) -> dict[str, Any]:
        """Wait for a trace of these spans, and no others."""
        with suppress(AssertionError):
            await until(lambda: paths <= self.trace(trace_id).keys(), within_s=15)
        spans = self.trace(trace_id)
        assert not (missing := paths - spans.keys()), f"missing: {missing}"
        assert not (others := spans.keys() - paths), f"not expected: {others}"
        return spans


def marks_of(span: Any) -> dict[str, Any]:
    """The attributes of a span, a link or an event."""
    return {attribute.key: attribute.value for attribute in span.attributes}


@asynccontextmanager
async def collecting(collector: Collector | None = None) -> AsyncIterator[tuple[Collector, str]]:
    """A collector that is reached, and where; one that takes all, unless another is given."""
    collector, server = collector or Collector(), grpc.aio.server()
    add: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server  # untyped
    add(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        await server.stop(0)


def _with_hex_ids(value: Any) -> Any:
    """OTLP's JSON has ids in hexadecimal and enums as numbers; protobuf's does not."""
    if isinstance(value, list):
        return [_with_hex_ids(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: base64.b64decode(each).hex() if key in _IDS else _with_hex_ids(each)
        for key, each in value.items()
    }
