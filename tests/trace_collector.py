"""Where processes under test send their spans by OTLP, and what can be asked of them then."""

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from diptych.rpc.server import Context
from diptych.telemetry import attributes
from tests.waiting import until

CLIENT_SPAN = bytes.fromhex("eee19b7ec3c1b174")
_SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"
_IDS = ("traceId", "spanId", "parentSpanId")


class Collector:
    """Keeps what arrives by OTLP as it came, and decodes it only when it is asked for."""

    def __init__(self) -> None:
        self.exports: list[bytes] = []
        self._spans: list[tuple[str, Any]] = []
        self._num_decoded = 0  # of the exports

    async def export(self, request: bytes, context: Context) -> bytes:
        """One export; what is told of it is an empty message."""
        self.exports.append(request)
        return b""

    @property
    def spans(self) -> list[tuple[str, Any]]:
        """(service, span) pairs, as they came."""
        new, self._num_decoded = self.exports[self._num_decoded :], len(self.exports)
        for resource in (each for export in new for each in _decoded(export).resource_spans):
            marks = {a.key: a.value.string_value for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                self._spans += [(marks["service.name"], span) for span in scope.spans]
        return self._spans

    def json_lines(self) -> list[str]:
        """What a collector's file exporter would have written."""
        return [
            json.dumps(_with_hex_ids(MessageToDict(_decoded(each), use_integers_for_enums=True)))
            for each in self.exports
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
    method = grpc.unary_unary_rpc_method_handler(collector.export)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(_SERVICE, {"Export": method}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        await server.stop(0)


def _decoded(export: bytes) -> Any:
    return trace_service_pb2.ExportTraceServiceRequest.FromString(export)


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
