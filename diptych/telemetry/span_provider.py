"""What makes the spans of a process that traces, and sends them: OpenTelemetry's SDK.

Loaded where there is somewhere to send them, by ``tracing``. Called from the event-loop thread;
export happens on the SDK's own thread.
"""

import threading
import time
from typing import Final

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

from diptych import __version__
from diptych.telemetry.counted_exporter import CountedExporter
from diptych.telemetry.counted_spans import CountedSpans
from diptych.telemetry.held_spans import HeldSpans
from diptych.telemetry.samplers import sampler_of
from diptych.telemetry.sampling import Sampling
from diptych.telemetry.standard_tracing import StandardTracing

EXPORT_TIMEOUT_S = 5.0
_MAX_QUEUED: Final = 4096
_SEND_EVERY_MS: Final = 500


class PlannedIds(RandomIdGenerator):
    """Random ids, but for the next span the one that was planned for it, if one was."""

    def __init__(self) -> None:
        self.planned: int | None = None

    def generate_span_id(self) -> int:
        """The id of a span that begins."""
        return super().generate_span_id() if self.planned is None else self.planned


class SpanProvider:
    """Owns the SDK's provider, what is held of its spans and what was sent."""

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
        self.ids = PlannedIds()
        self._provider = TracerProvider(
            sampler=sampler_of(
                sampled,
                time.monotonic,
                # A provider that is given none makes the one that the variables name.
                TracerProvider(shutdown_on_exit=False).sampler if standard.has_sampler else None,
            ),
            resource=resource,
            id_generator=self.ids,
            span_limits=SpanLimits(),
            shutdown_on_exit=False,
        )
        self.spans = _counted(exporter, standard)
        self.held = HeldSpans(self.spans, time.monotonic)
        self._provider.add_span_processor(self.held)
        self.tracer = self._provider.get_tracer("diptych", __version__)

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
