"""Spans of one process, sent by OTLP; nothing is recorded without an endpoint.

A ``Tracing`` owns its own provider (never the global one), so that a router and
its workers can live in one test process. Times given by callers are of the
monotonic clock in seconds, as everywhere in Diptych; they are mapped to wall
time by one offset taken at construction. Called from the event-loop thread;
export happens on the SDK's own thread and never blocks.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    NoOpTracer,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    Tracer,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from diptych import __version__
from diptych.telemetry import attributes, sampling
from diptych.telemetry.counted_exporter import CountedExporter
from diptych.telemetry.counted_spans import CountedSpans
from diptych.telemetry.held_spans import HeldSpans
from diptych.telemetry.sampling import Sampling
from diptych.telemetry.stages import Stage

logger = logging.getLogger(__name__)

AttributeValue = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, AttributeValue]
Metadata = Sequence[tuple[str, str | bytes]]  # of a call, or headers
EXPORT_TIMEOUT_S = 5.0
SDK_MAX_QUEUED: Final = 2048  # spans, where it is not said
_MAX_QUEUED: Final = 4096
_SEND_EVERY_MS: Final = 500


class StandardTracing(NamedTuple):
    """Which of OpenTelemetry's own variables (``OTEL_*``) are set."""

    has_endpoint: bool = False
    is_http: bool = False  # where there is an endpoint: OTLP over HTTP, not over gRPC
    has_service_name: bool = False
    has_sampler: bool = False
    has_batching: bool = False
    max_queued: int = SDK_MAX_QUEUED  # spans; with has_batching


NOTHING_STANDARD: Final = StandardTracing()

_propagator = TraceContextTextMapPropagator()


class Tracing:
    """Makes this process's spans. One per process object; ``shutdown`` ends it."""

    def __init__(
        self,
        service_name: str,
        *,
        endpoint: str | None = None,
        sampled: Sampling = sampling.WHOLE,
        standard: StandardTracing = NOTHING_STANDARD,
        instance_id: str = "",
        exporter: SpanExporter | None = None,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """``endpoint`` is an OTLP/gRPC collector (``http://host:4317``).

        Without ``endpoint`` and ``exporter`` spans cost next to nothing and go
        nowhere, but a client's trace context is still passed on. What the
        ``standard`` variables say is left to the SDK, which reads them itself. ``wall_ns``
        is the clock of this machine.
        """
        self._wall_offset_ns = wall_ns() - time.monotonic_ns()
        self._ids = _PlannedIds()
        self._held: HeldSpans | None = None
        self._spans: CountedSpans | None = None
        self._provider: TracerProvider | None = None
        self._tracer: Tracer = NoOpTracer()
        if exporter is None and endpoint is None and standard.has_endpoint:
            exporter = _standard_exporter(is_http=standard.is_http)
        elif exporter is None and endpoint is not None:
            exporter = OTLPSpanExporter(
                endpoint=endpoint,
                insecure=not endpoint.startswith("https"),
                timeout=EXPORT_TIMEOUT_S,
            )
        if exporter is None:
            return
        resource = Resource.create(
            {
                **({} if standard.has_service_name else {"service.name": service_name}),
                "service.version": __version__,
                **({"service.instance.id": instance_id} if instance_id else {}),
            }
        )
        self._provider = TracerProvider(
            sampler=sampling.sampler_of(
                sampled,
                time.monotonic,
                # A provider that is given none makes the one that the variables name.
                TracerProvider(shutdown_on_exit=False).sampler if standard.has_sampler else None,
            ),
            resource=resource,
            id_generator=self._ids,
            span_limits=SpanLimits(),
            shutdown_on_exit=False,
        )
        self._spans = _counted(exporter, standard)
        self._held = HeldSpans(self._spans, time.monotonic)
        self._provider.add_span_processor(self._held)
        self._tracer = self._provider.get_tracer("diptych", __version__)

    @property
    def enabled(self) -> bool:
        """Whether spans go anywhere."""
        return self._provider is not None

    @property
    def num_held(self) -> int:
        """Spans that wait for the word on their trace."""
        return 0 if self._held is None else self._held.num_held

    @property
    def num_forgotten(self) -> int:
        """Held spans that were dropped without a word: it did not come, or they were too many."""
        return 0 if self._held is None else self._held.num_forgotten

    @property
    def num_sent(self) -> int:
        """Spans that the collector took."""
        return 0 if self._spans is None else self._spans.num_sent

    @property
    def num_unsent(self) -> int:
        """Spans that were to be sent, and that the collector did not take."""
        return 0 if self._spans is None else self._spans.num_unsent

    def now_s(self) -> float:
        """What this process's spans call now: seconds since 1970 by its machine's clock."""
        return self._wall_ns(time.monotonic()) / 1e9

    def decide(self, hold: int, *, keep: bool) -> None:
        """Send or drop what is held under ``hold``, and what will still end of it."""
        if self._held is not None:
            self._held.decide(hold, keep=keep)

    def start(
        self,
        stage: Stage | str,
        parent: Context | None = None,
        *,
        start_s: float | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes | None = None,
        links: Sequence[Link] = (),
    ) -> Span:
        """Start a span; the caller ends it with :meth:`end`.

        ``stage`` is a Stage, or the name of a root span (``chat <model>``).
        Without ``parent`` it begins a trace. ``start_s`` may lie in the past.
        """
        name, marks = _name_and_marks(stage)
        start_ns = self._wall_ns(time.monotonic() if start_s is None else start_s)
        return self._tracer.start_span(
            name,
            context=Context() if parent is None else parent,
            kind=kind,
            attributes={**marks, **(attributes or {})},
            links=links,
            start_time=start_ns,
        )

    def end(
        self,
        span: Span,
        *,
        end_s: float | None = None,
        attributes: Attributes | None = None,
        error: str | None = None,
    ) -> None:
        """End ``span``; ``error`` is the reason if it failed (``KV_BLOCKS_EXHAUSTED``)."""
        if attributes:
            span.set_attributes(attributes)
        if error is not None:
            span.set_attribute("error.type", error)
            span.set_status(StatusCode.ERROR, error)
        span.end(self._wall_ns(time.monotonic() if end_s is None else end_s))

    def plan(self, parent: Context) -> Context:
        """The context of a span under ``parent`` that ``record`` writes when it is over.

        So other processes can begin its children meanwhile. Without an exporter there is no
        such span: they get ``parent``.
        """
        above = get_current_span(parent).get_span_context()
        if not self.enabled or not above.is_valid:
            return parent
        planned = SpanContext(
            above.trace_id,
            self._ids.generate_span_id(),
            is_remote=False,
            trace_flags=above.trace_flags,
            trace_state=above.trace_state,
        )
        return context_of(NonRecordingSpan(planned))

    def record(
        self,
        stage: Stage,
        parent: Context,
        start_s: float,
        end_s: float,
        *,
        planned: Context | None = None,
        attributes: Attributes | None = None,
        error: str | None = None,
        links: Sequence[Link] = (),
    ) -> Context:
        """Record a span whose times became known afterwards; its context.

        ``planned`` is what ``plan`` said of it, if it was asked.
        """
        if planned is not None:
            self._ids.planned = get_current_span(planned).get_span_context().span_id
        span = self.start(stage, parent, start_s=start_s, attributes=attributes, links=links)
        self._ids.planned = None
        self.end(span, end_s=max(start_s, end_s), error=error)
        return context_of(span)

    @contextmanager
    def span(
        self, stage: Stage, parent: Context | None = None, *, attributes: Attributes | None = None
    ) -> Iterator[Span]:
        """Cover a block of code. Not across a ``yield`` of a handler: use start and end there."""
        span = self.start(stage, parent, attributes=attributes)
        try:
            yield span
        except BaseException as error:
            self.end(span, error=str(getattr(error, "reason", type(error).__name__)))
            raise
        self.end(span)

    def shutdown(self, timeout_s: float = 2.0) -> None:
        """Send what is left and stop, within ``timeout_s``. Blocks: call it off the event loop."""
        if self._provider is None or self._spans is None:
            return
        # The SDK's shutdown has no bound of its own; a dead collector must not delay our exit.
        ending = threading.Thread(target=self._provider.shutdown, name="trace-flush", daemon=True)
        ending.start()
        ending.join(timeout_s)
        self._spans.close()
        if ending.is_alive():
            logger.warning("spans were left unsent", extra={"timeout_s": timeout_s})

    def _wall_ns(self, monotonic_s: float) -> int:
        return self._wall_offset_ns + round(monotonic_s * 1e9)


def _standard_exporter(*, is_http: bool) -> SpanExporter:
    """Where the SDK's own variables say. What speaks HTTP is loaded only for it."""
    if not is_http:
        return OTLPSpanExporter(timeout=EXPORT_TIMEOUT_S)
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


class _PlannedIds(RandomIdGenerator):
    """Random ids, but for the next span the one that was planned for it, if one was."""

    def __init__(self) -> None:
        self.planned: int | None = None

    def generate_span_id(self) -> int:
        """The id of a span that begins."""
        return super().generate_span_id() if self.planned is None else self.planned


def _name_and_marks(stage: Stage | str) -> tuple[str, dict[str, str]]:
    if isinstance(stage, Stage):
        return stage.span_name, {attributes.STAGE: stage.value}
    return stage, {}


def context_of(span: Span) -> Context:
    """The context whose parent is ``span``: for child spans and for ``inject_*``."""
    return set_span_in_context(span, Context())


def links_to(context: Context, attributes: Attributes | None = None) -> tuple[Link, ...]:
    """A link to the span of ``context``, if it has one; ``attributes`` say how it is linked."""
    linked = get_current_span(context).get_span_context()
    return (Link(linked, attributes),) if linked.is_valid else ()


def hold_of(context: Context) -> int | None:
    """The id under which the trace of ``context`` is held until it is over; None: it is not."""
    return sampling.hold_of(get_current_span(context).get_span_context())


def trace_id(context: Context) -> str:
    """The W3C trace id of ``context`` in hex; empty when there is none."""
    parts = inject_map(context).get("traceparent", "").split("-")
    return parts[1] if len(parts) > 1 else ""


def extract_metadata(metadata: Metadata | None) -> Context:
    """Read the W3C context from gRPC metadata; an empty context if there is none."""
    carrier = {k: v for k, v in metadata or () if isinstance(v, str) and k in _propagator.fields}
    return _propagator.extract(carrier, Context())


def inject_metadata(context: Context) -> tuple[tuple[str, str], ...]:
    """The W3C context as gRPC metadata, to append to a call's own."""
    return tuple(inject_map(context).items())


def extract_map(carrier: Mapping[str, str]) -> Context:
    """Read the W3C context from a message's map (``Reserve.trace_context``)."""
    return _propagator.extract(dict(carrier), Context())


def inject_map(context: Context) -> dict[str, str]:
    """The W3C context as a map."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, context)
    return carrier
