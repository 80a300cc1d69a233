"""A span as it is while it lasts: plain facts. The SDK's is made of it where it is sent."""

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, SpanKind
from opentelemetry.util.types import AttributeValue


class Happened(NamedTuple):
    """An event of a span."""

    name: str
    attributes: Mapping[str, AttributeValue]
    at_ns: int  # since 1970


class PlainSpan(NonRecordingSpan):
    """What is said of a span; costs next to nothing until it is sent, if it is.

    One owner writes it until it is ended; then nobody does, so that another thread may read it.
    """

    def __init__(
        self,
        context: SpanContext,
        parent: SpanContext,
        name: str,
        kind: SpanKind,
        start_ns: int,
        attributes: dict[str, AttributeValue],
        links: Sequence[Link],
        *,
        offset_ns: int = 0,
    ) -> None:
        """Without a valid ``parent`` it begins its trace. Owns ``attributes``.

        ``offset_ns`` is what its times have beyond the monotonic clock's, its end as its start.
        """
        super().__init__(context)
        self.context, self.parent = context, parent
        self.name, self.kind, self.start_ns = name, kind, start_ns
        self.attributes, self.links = attributes, links
        self.events: list[Happened] = []
        self.end_ns, self.offset_ns = start_ns, offset_ns
        self.error: str | None = None  # the reason, if it failed

    def is_recording(self) -> bool:
        """Whether it may be sent."""
        return self.context.trace_flags.sampled

    def set_attribute(self, key: str, value: AttributeValue) -> None:
        """Say this of it."""
        self.attributes[key] = value

    def set_attributes(self, attributes: Mapping[str, AttributeValue]) -> None:
        """Say all this of it."""
        self.attributes.update(attributes)

    def add_event(
        self,
        name: str,
        attributes: Mapping[str, AttributeValue] | None = None,
        timestamp: int | None = None,
    ) -> None:
        """Say that something happened, now if it is not said when (ns since 1970)."""
        self.events.append(Happened(name, attributes or {}, timestamp or time.time_ns()))
