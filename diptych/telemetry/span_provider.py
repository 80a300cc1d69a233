"""What makes the spans of a process that traces, and sends them: OpenTelemetry's SDK.

Loaded where there is somewhere to send them, by ``tracing``. Called from the event-loop thread;
export happens on the SDK's own thread.
"""

import threading
import time
from collections.abc import Sequence
from typing import Final

from opentelemetry.attributes import BoundedAttributes
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    SpanContext,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    get_current_span,
)
from opentelemetry.util.types import Attributes

from diptych import __version__
from diptych.telemetry.counted_exporter import CountedExporter
from diptych.telemetry.counted_spans import CountedSpans
from diptych.telemetry.held_spans import HeldSpans
from diptych.telemetry.samplers import sampler_of
from diptych.telemetry.sampling import Sampling
from diptych.telemetry.standard_tracing import StandardTracing

_SCOPE: Final = "diptych"
EXPORT_TIMEOUT_S = 5.0
_MAX_QUEUED: Final = 4096
_SEND_EVERY_MS: Final = 2000  # an export takes 2 ms of a core, and hardly more for many spans


class SpanProvider:
    """Owns the SDK's provider, what is held of its spans and what was sent.

    The SDK's tracer makes the spans that change while they last. One that is known whole is a
    plain record, which costs far less.
    """

    def __init__(
        self,
        service_name: str,
        exporter: SpanExporter,
        *,
        sampled: Sampling,
        standard: StandardTracing,
        instance_id: str,
    ) -> None:
        """See :class:`diptych.telemetry.tracing.Tracing`."""
        resource = Resource.create(
            {
                **({} if standard.has_service_name else {"service.name": service_name}),
                "service.version": __version__,
                **({"service.instance.id": instance_id} if instance_id else {}),
            }
        )
        self._ids, self._limits = RandomIdGenerator(), SpanLimits()
        self._sampler = sampler_of(
            sampled,
            time.monotonic,
            # A provider that is given none makes the one that the variables name.
            TracerProvider(shutdown_on_exit=False).sampler if standard.has_sampler else None,
        )
        self._provider = TracerProvider(
            sampler=self._sampler,
            resource=resource,
            id_generator=self._ids,
            span_limits=self._limits,
            shutdown_on_exit=False,
        )
        self._scope = InstrumentationScope(_SCOPE, __version__)
        self.spans = _counted(exporter, standard)
        self.held = HeldSpans(self.spans, time.monotonic)
        self._provider.add_span_processor(self.held)
        self.tracer = self._provider.get_tracer(_SCOPE, __version__)

    def plan(self, parent: Context, name: str) -> SpanContext:
        """Of a span under ``parent`` that is recorded when it is over."""
        above = get_current_span(parent).get_span_context()
        trace_id, flags, state = above.trace_id, above.trace_flags, above.trace_state
        if above.is_remote or not above.is_valid:  # else the sampler was asked for that one
            if not above.is_valid:
                trace_id = self._ids.generate_trace_id()
            said = self._sampler.should_sample(parent, trace_id, name)
            is_sampled = said.decision is Decision.RECORD_AND_SAMPLE
            flags = TraceFlags(flags & ~TraceFlags.SAMPLED | is_sampled * TraceFlags.SAMPLED)
            state = said.trace_state or TraceState()
        return SpanContext(
            trace_id,
            self._ids.generate_span_id(),
            is_remote=False,
            trace_flags=flags,
            trace_state=state,
        )

    def record(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext,
        attributes: Attributes,
        start_ns: int,
        end_ns: int,
        *,
        error: str | None,
        links: Sequence[Link],
    ) -> None:
        """A span that is over, of a sampled ``context``. Times are ns since 1970."""
        limits = self._limits
        self.held.on_end(
            ReadableSpan(
                name,
                context,
                parent if parent.is_valid else None,
                self._provider.resource,
                BoundedAttributes(
                    limits.max_span_attributes,
                    attributes,
                    max_value_len=limits.max_span_attribute_length,
                ),
                links=links,
                status=Status() if error is None else Status(StatusCode.ERROR, error),
                start_time=start_ns,
                end_time=end_ns,
                instrumentation_scope=self._scope,
            )
        )

    def shutdown(self, timeout_s: float) -> bool:
        """Send what is left and stop; whether that took no longer than ``timeout_s``. Blocks."""
        # The SDK's shutdown has no bound of its own; a dead collector must not delay our exit.
        ending = threading.Thread(target=self._provider.shutdown, name="trace-flush", daemon=True)
        ending.start()
        ending.join(timeout_s)
        self.spans.close()
        return not ending.is_alive()


def exporter_to(endpoint: str | None, standard: StandardTracing) -> SpanExporter:
    """To ``endpoint``, OTLP over gRPC; else where the SDK's own variables say."""
    if endpoint is not None:
        return OTLPSpanExporter(
            endpoint=endpoint,
            insecure=not endpoint.startswith("https"),
            timeout=EXPORT_TIMEOUT_S,
        )
    if not standard.is_http:
        return OTLPSpanExporter(timeout=EXPORT_TIMEOUT_S)
    # What speaks HTTP is loaded only for it.
    from opentelemetry.exporter.otlp.proto.http import trace_exporter

    return trace_exporter.OTLPSpanExporter(timeout=EXPORT_TIMEOUT_S)


def _counted(exporter: SpanExporter, standard: StandardTracing) -> CountedSpans:
    counted = CountedExporter(exporter)
    if standard.has_batching:
        most = standard.max_queued
        return CountedSpans(BatchSpanProcessor(counted, max_queue_size=most), counted, most)
    queue = BatchSpanProcessor(
        counted, max_queue_size=_MAX_QUEUED, schedule_delay_millis=_SEND_EVERY_MS
    )
    return CountedSpans(queue, counted, _MAX_QUEUED)
