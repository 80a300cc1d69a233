"""Makes the SDK's spans of plain ones, as its limits (``OTEL_..._LIMIT``) want them."""

from opentelemetry.attributes import BoundedAttributes
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanLimits
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Status, StatusCode
from opentelemetry.util.types import Attributes

from diptych import __version__
from diptych.telemetry.plain_span import PlainSpan


class SpanWriter:
    """Of one process. Called on the thread that exports."""

    def __init__(self, resource: Resource) -> None:
        self._resource, self._limits = resource, SpanLimits()
        self._scope = InstrumentationScope("diptych", __version__)

    def written(self, span: PlainSpan) -> ReadableSpan:
        """What an exporter takes."""
        limits = self._limits
        return ReadableSpan(
            span.name,
            span.context,
            span.parent if span.parent.is_valid else None,
            self._resource,
            self._bounded(span.attributes, limits.max_span_attributes),
            events=[
                Event(name, self._bounded(said, limits.max_event_attributes), at_ns)
                for name, said, at_ns in span.events
            ],
            links=span.links,
            kind=span.kind,
            status=Status() if span.error is None else Status(StatusCode.ERROR, span.error),
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=self._scope,
        )

    def _bounded(self, attributes: Attributes, max_attributes: int | None) -> BoundedAttributes:
        length = self._limits.max_span_attribute_length
        return BoundedAttributes(max_attributes, attributes, max_value_len=length)
