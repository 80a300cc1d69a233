"""Counts what an exporter was given and what it sent."""

from collections.abc import Callable, Sequence
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult


class CountedExporter(SpanExporter):
    """Passes everything on to another exporter, which it owns, as that takes it.

    Exports on the one thread that the SDK has for them; the counts may be read on any.
    """

    def __init__(self, exporter: SpanExporter, written: Callable[[Any], ReadableSpan]) -> None:
        """``written`` makes the SDK's spans of what was queued."""
        self._exporter, self._written = exporter, written
        self.num_taken = 0  # spans that were given to it
        self.num_sent = 0  # of those, what the collector took
        self.num_failed = 0  # and what it did not take, however often it was tried

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """See the SDK's SpanExporter."""
        self.num_taken += len(spans)
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export([self._written(span) for span in spans])
        finally:
            if result is SpanExportResult.SUCCESS:
                self.num_sent += len(spans)
            else:
                self.num_failed += len(spans)
        return result

    def shutdown(self) -> None:
        """See the SDK's SpanExporter."""
        self._exporter.shutdown()
