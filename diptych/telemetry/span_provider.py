"""What makes the spans of a process that traces, and sends them: OpenTelemetry's SDK.

Loaded where there is somewhere to send them, by ``tracing``. Called from the event-loop thread;
export happens on the SDK's own thread.
"""

import threading
import time
from typing import Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import SpanContext, TraceFlags, TraceState, get_current_span

from diptych import __version__
from diptych.telemetry.counted_exporter import CountedExporter
from diptych.telemetry.counted_spans import CountedSpans
from diptych.telemetry.held_spans import HeldSpans
from diptych.telemetry.plain_span import PlainSpan
from diptych.telemetry.samplers import sampler_of
from diptych.telemetry.sampling import Sampling
from diptych.telemetry.span_writer import SpanWriter
from diptych.telemetry.standard_tracing import StandardTracing

EXPORT_TIMEOUT_S = 5.0  # where the SDK's own variables do not say it
_MAX_QUEUED: Final = 4096
_SEND_EVERY_MS: Final = 2000  # an export takes 2 ms of a core, and hardly more for many spans


class SpanProvider:
    """Says which spans are sent, and owns those that are held and those on their way.

    What the SDK would do for each span while a request waits is done where they are sent, for
    many at once: that costs a fraction.
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
        self._ids = RandomIdGenerator()
        self._sampler = sampler_of(
            sampled,
            time.monotonic,
            # A provider that is given none makes the one that the variables name.
            TracerProvider(shutdown_on_exit=False).sampler if standard.has_sampler else None,
        )
        self.spans = _counted(CountedExporter(exporter, SpanWriter(resource).written), standard)
        self.held = HeldSpans(self.spans.send, time.monotonic)

    def plan(self, parent: Context, name: str) -> SpanContext:
        """Of a span that begins under ``parent``, now or when it is over."""
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

    def ended(self, span: PlainSpan) -> None:
        """Hold it, or send it."""
        self.held.ended(span)

    def shutdown(self, timeout_s: float) -> bool:
        """Send what is left and stop; whether that took no longer than ``timeout_s``. Blocks."""
        # The SDK's shutdown has no bound of its own; a dead collector must not delay our exit.
        ending = threading.Thread(target=self.spans.shutdown, name="trace-flush", daemon=True)
        ending.start()
        ending.join(timeout_s)
        self.spans.close()
        return not ending.is_alive()


def exporter_to(endpoint: str | None, standard: StandardTracing) -> SpanExporter:
    """To ``endpoint``, OTLP over gRPC; else where the SDK's own variables say.

    Raises ValueError: they say what is no time.
    """
    timeout_s = None if standard.has_timeout else EXPORT_TIMEOUT_S
    if endpoint is not None:
        return OTLPSpanExporter(
            endpoint=endpoint,
            insecure=not endpoint.startswith("https"),
            timeout=timeout_s,
        )
    if not standard.is_http:
        return OTLPSpanExporter(timeout=timeout_s)
    # What speaks HTTP is loaded only for it.
    from opentelemetry.exporter.otlp.proto.http import trace_exporter

    return trace_exporter.OTLPSpanExporter(timeout=timeout_s)


def _counted(exporter: CountedExporter, standard: StandardTracing) -> CountedSpans:
    if standard.has_batching:
        most = standard.max_queued
        return CountedSpans(BatchSpanProcessor(exporter, max_queue_size=most), exporter, most)
    queue = BatchSpanProcessor(
        exporter, max_queue_size=_MAX_QUEUED, schedule_delay_millis=_SEND_EVERY_MS
    )
    return CountedSpans(queue, exporter, _MAX_QUEUED)
