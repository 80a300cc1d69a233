"""Knows of each span that is to be sent whether it was, so that metrics can tell."""

from typing import cast

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor

from diptych.telemetry.counted_exporter import CountedExporter
from diptych.telemetry.plain_span import PlainSpan


class CountedSpans:
    """Passes spans on to the SDK's queue before an exporter, as many as it holds.

    The SDK tells nobody of what it drops where its queue is full; so it is never let be: the
    span that finds it full is dropped here. Invariant: each span that was to be sent was sent,
    is unsent, or waits; once it is closed none waits. Called on the event loop's thread, but for
    ``shutdown`` and ``close``.
    """

    def __init__(self, queue: SpanProcessor, exporter: CountedExporter, max_queued: int) -> None:
        """``queue`` holds so many spans at the most, and exports them with ``exporter``."""
        self._queue, self._exporter, self._max_queued = queue, exporter, max_queued
        self._num_passed = 0
        self._num_dropped = 0
        self._is_closed = False

    @property
    def num_sent(self) -> int:
        """Spans that the collector took."""
        return self._exporter.num_sent

    @property
    def num_unsent(self) -> int:
        """Spans that it did not take, and will not."""
        num_unsent = self._num_dropped + self._exporter.num_failed
        return num_unsent + self._num_waiting if self._is_closed else num_unsent

    def close(self) -> None:
        """What waits now waits in vain, and what is still to come is not sent."""
        self._is_closed = True

    def send(self, span: PlainSpan) -> None:
        """Queue it, if it is to be sent and there is room."""
        if not span.context.trace_flags.sampled:
            return  # nor would the SDK send it
        # One that was taken has left the queue: it has no more spans than this says.
        num_queued = self._num_passed - self._exporter.num_taken
        if self._is_closed or num_queued >= self._max_queued:
            self._num_dropped += 1
            return
        self._num_passed += 1
        # Until the exporter has it, nobody looks at more of it than its context.
        self._queue.on_end(cast(ReadableSpan, span))

    def shutdown(self) -> None:
        """Send what is queued, and stop. Blocks."""
        self._queue.shutdown()

    @property
    def _num_waiting(self) -> int:
        """In the queue, or with the collector, which has not answered."""
        return self._num_passed - self._exporter.num_sent - self._exporter.num_failed
