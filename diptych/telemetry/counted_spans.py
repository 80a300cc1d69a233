"""Knows of each span that is to be sent whether it was, so that metrics can tell."""

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor

from diptych.telemetry.counted_exporter import CountedExporter


class CountedSpans(SpanProcessor):
    """Passes spans on to the SDK's queue before an exporter, as many as it holds.

    The SDK tells nobody of what it drops where its queue is full; so it is never let be: the
    span that finds it full is dropped here. Invariant: each span that was to be sent was sent,
    is unsent, or waits; once it is closed none waits. Called on the event loop's thread, but for
    ``shutdown`` and ``close``.
    """

    def __init__(self, send: SpanProcessor, exporter: CountedExporter, max_queued: int) -> None:
        """``send`` queues so many spans at the most, and exports them with ``exporter``."""
        self._send, self._exporter, self._max_queued = send, exporter, max_queued
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

    def on_end(self, span: ReadableSpan) -> None:
        """See the SDK's SpanProcessor."""
        if span.context is None or not span.context.trace_flags.sampled:
            return  # nor would the SDK send it
        # One that was taken has left the queue: it has no more spans than this says.
        num_queued = self._num_passed - self._exporter.num_taken
        if self._is_closed or num_queued >= self._max_queued:
            self._num_dropped += 1
            return
        self._num_passed += 1
        self._send.on_end(span)

    def shutdown(self) -> None:
        """See the SDK's SpanProcessor."""
        self._send.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """See the SDK's SpanProcessor."""
        return self._send.force_flush(timeout_millis)

    @property
    def _num_waiting(self) -> int:
        """In the queue, or with the collector, which has not answered."""
        return self._num_passed - self._exporter.num_sent - self._exporter.num_failed
