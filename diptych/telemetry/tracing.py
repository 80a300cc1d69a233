"""Spans of one process, sent by OTLP; nothing is recorded without an endpoint.

A ``Tracing`` owns its own provider (never the global one), so that a router and
its workers can live in one test process. Times given by callers are of the
monotonic clock in seconds, as everywhere in Diptych; they are mapped to wall
time by one offset, which is taken anew where the machine's clock was set. Called from
the event-loop thread; export happens on the SDK's own thread and never blocks.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING

from opentelemetry.context import Context
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanKind,
    format_trace_id,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from diptych.errors import ConfigurationError
from diptych.telemetry import attributes, sampling
from diptych.telemetry.plain_span import PlainSpan
from diptych.telemetry.sampling import Sampling
from diptych.telemetry.stages import Stage
from diptych.telemetry.standard_tracing import NOTHING_STANDARD, StandardTracing

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from diptych.telemetry.span_provider import SpanProvider

logger = logging.getLogger(__name__)

AttributeValue = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, AttributeValue]
Metadata = Sequence[tuple[str, str | bytes]]  # of a call, or headers

_ERROR_TYPE = attributes.ERROR_TYPE  # the name means other things below
_NO_MARKS: Attributes = MappingProxyType({})
_TRACE_STATE = "tracestate"
_MAX_TRACE_STATE = 512  # characters, which W3C Trace Context has everybody pass on at least
_SET_S = 0.1  # by how much the machine's clock differs from what is known, if it was set
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
        exporter: "SpanExporter | None" = None,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """``endpoint`` is an OTLP/gRPC collector (``http://host:4317``).

        Without ``endpoint`` and ``exporter``, or where ``standard`` says so, spans cost next
        to nothing and go nowhere, but a client's trace context is still passed on. What the
        ``standard`` variables say is left to the SDK, which reads them itself. ``wall_ns``
        is the clock of this machine.

        Raises ConfigurationError: the SDK does not take what they say, or cannot read it.
        """
        self._clock_ns = wall_ns
        self._wall_offset_ns = wall_ns() - time.monotonic_ns()
        self._provider: SpanProvider | None = None
        if standard.is_disabled:
            return
        if exporter is None and endpoint is None and not standard.has_endpoint:
            return
        # The SDK and the exporter are an eighth of what a router loads.
        from opentelemetry.exporter.otlp.proto.grpc.exporter import (
            InvalidCompressionValueException,
        )

        from diptych.telemetry import span_provider

        try:
            self._provider = span_provider.SpanProvider(
                service_name,
                exporter or span_provider.exporter_to(endpoint, standard),
                sampled=sampled,
                standard=standard,
                instance_id=instance_id,
            )
        except (OSError, ValueError, InvalidCompressionValueException) as error:
            raise ConfigurationError(f"environment: OTEL_*: {error}") from None

    @property
    def enabled(self) -> bool:
        """Whether spans go anywhere."""
        return self._provider is not None

    @property
    def num_held(self) -> int:
        """Spans that wait for the word on their trace."""
        return 0 if self._provider is None else self._provider.held.num_held

    @property
    def num_forgotten(self) -> int:
        """Held spans that were dropped without a word: it did not come, or they were too many."""
        return 0 if self._provider is None else self._provider.held.num_forgotten

    @property
    def num_sent(self) -> int:
        """Spans that the collector took."""
        return 0 if self._provider is None else self._provider.spans.num_sent

    @property
    def num_unsent(self) -> int:
        """Spans that were to be sent, and that the collector did not take."""
        return 0 if self._provider is None else self._provider.spans.num_unsent

    def now_s(self) -> float:
        """What this process's spans call now: seconds since 1970 by its machine's clock."""
        self._look_at_clock()
        return self._wall_ns(time.monotonic()) / 1e9

    def decide(self, hold: int, *, keep: bool) -> None:
        """Send or drop what is held under ``hold``, and what will still end of it."""
        if self._provider is not None:
            self._provider.held.decide(hold, keep=keep)

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
        parent = Context() if parent is None else parent
        if self._provider is None:
            return get_current_span(parent)
        self._look_at_clock()
        name, marks = _name_and_marks(stage)
        return PlainSpan(
            self._provider.plan(parent, name),
            get_current_span(parent).get_span_context(),
            name,
            kind,
            self._wall_ns(time.monotonic() if start_s is None else start_s),
            {**marks, **(attributes or {})},
            links,
            offset_ns=self._wall_offset_ns,
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
        if self._provider is None or not isinstance(span, PlainSpan) or not span.is_recording():
            return
        if attributes:
            span.set_attributes(attributes)
        if error is not None:
            span.set_attribute(_ERROR_TYPE, error)
            span.error = error
        end_s = time.monotonic() if end_s is None else end_s
        span.end_ns = span.offset_ns + round(end_s * 1e9)  # the clock may have been set meanwhile
        self._provider.ended(span)

    def plan(self, parent: Context, stage: Stage) -> Context:
        """The context of a span under ``parent`` that ``record`` writes when it is over.

        So other processes can begin its children meanwhile. Without an exporter there is no
        such span: they get ``parent``.
        """
        if self._provider is None:
            return parent
        return context_of(NonRecordingSpan(self._provider.plan(parent, stage.span_name)))

    def record(
        self,
        stage: Stage,
        parent: Context,
        start_s: float,
        end_s: float,
        *,
        planned: Context | None = None,
        attributes: Attributes = _NO_MARKS,
        error: str | None = None,
        links: Sequence[Link] = (),
    ) -> Context:
        """Record a span whose times became known afterwards; its context.

        ``planned`` is what ``plan`` said of it, if it was asked.
        """
        if self._provider is None:
            return parent
        context = self.plan(parent, stage) if planned is None else planned
        own = get_current_span(context).get_span_context()
        if not own.trace_flags.sampled:
            return context
        self._look_at_clock()
        name, marks = _name_and_marks(stage)
        above = get_current_span(parent).get_span_context()
        span = PlainSpan(
            own,
            above,
            name,
            SpanKind.INTERNAL,
            self._wall_ns(start_s),
            {**marks, **attributes},
            links,
            offset_ns=self._wall_offset_ns,
        )
        self.end(span, end_s=max(start_s, end_s), error=error)
        return context

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
        if self._provider is not None and not self._provider.shutdown(timeout_s):
            logger.warning("spans were left unsent", extra={"timeout_s": timeout_s})

    def _wall_ns(self, monotonic_s: float) -> int:
        return self._wall_offset_ns + round(monotonic_s * 1e9)

    def _look_at_clock(self) -> None:
        """Whether the machine's clock was set, or went on while the machine slept: follow it."""
        before_s = time.monotonic()
        offset_ns = self._clock_ns() - round(before_s * 1e9)
        most_s = _SET_S + time.monotonic() - before_s  # we may have been held up in between
        if abs(offset_ns - self._wall_offset_ns) > most_s * 1e9:
            self._wall_offset_ns = offset_ns


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
    above = get_current_span(context).get_span_context()
    return format_trace_id(above.trace_id) if above.is_valid else ""


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
    """The W3C context as a map; of its ``tracestate`` no more than has to be passed on.

    gRPC takes 8 KiB of metadata with a call, and all of it counts. Entries in front are the newest:
    the first is the one by which all processes hold their spans, if they do.
    """
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, context)
    state = carrier.get(_TRACE_STATE, "")
    if len(state) > _MAX_TRACE_STATE:
        kept = _first_of(state.split(","), _MAX_TRACE_STATE)
        if kept:
            carrier[_TRACE_STATE] = kept
        else:
            del carrier[_TRACE_STATE]
    return carrier


def _first_of(entries: Sequence[str], num_characters: int) -> str:
    """As many as there is room for, joined; a long one makes room for others."""
    kept: list[str] = []
    num_left = num_characters
    for entry in entries:
        num = len(entry) + bool(kept)
        if num <= num_left:
            kept.append(entry)
            num_left -= num
    return ",".join(kept)
