"""Spans of traces of which the router has not said yet whether they are to be sent."""

from collections import OrderedDict
from collections.abc import Callable

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor

from diptych.telemetry.sampling import hold_of

MAX_SPANS = 8192  # that are held; the oldest traces make room
MAX_AGE_S = 900.0  # of a held trace: a router that has not spoken by then will not
_MAX_WORDS = 8192  # of routers that are remembered, for spans that end after them


class HeldSpans(SpanProcessor):
    """Passes on spans that are to be sent; keeps those that are held until ``decide``.

    Invariant: at most ``max_spans`` are held, none older than ``max_age_s`` is ever sent, and
    a span that ends after the word on its trace goes where the word sent the others. Called on
    the event loop's thread alone.
    """

    def __init__(
        self,
        send: SpanProcessor,
        clock: Callable[[], float],
        *,
        max_spans: int = MAX_SPANS,
        max_age_s: float = MAX_AGE_S,
    ) -> None:
        """``send`` takes what is to be sent; ``clock`` is monotonic, s."""
        self._send, self._clock = send, clock
        self._max_spans, self._max_age_s = max_spans, max_age_s
        self._held: OrderedDict[int, tuple[float, list[ReadableSpan]]] = OrderedDict()
        self._words: OrderedDict[int, bool] = OrderedDict()
        self.num_held = 0
        self.num_forgotten = 0  # held spans that were dropped without a word

    def decide(self, hold: int, *, keep: bool) -> None:
        """The router's word on the trace that is held under ``hold``, heard of or not."""
        self._forget_old()
        self._words[hold] = keep
        if len(self._words) > _MAX_WORDS:
            self._words.popitem(last=False)
        for span in self._take(hold):
            if keep:
                self._send.on_end(span)

    def on_end(self, span: ReadableSpan) -> None:
        """See the SDK's SpanProcessor."""
        hold = hold_of(span.context)
        word = True if hold is None else self._words.get(hold)
        if hold is not None and word is None:
            self._hold(hold, span)
        elif word:
            self._send.on_end(span)

    def shutdown(self) -> None:
        """See the SDK's SpanProcessor."""
        self._send.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """See the SDK's SpanProcessor."""
        return self._send.force_flush(timeout_millis)

    def _hold(self, hold: int, span: ReadableSpan) -> None:
        self._forget_old()
        _, spans = self._held.setdefault(hold, (self._clock(), []))
        spans.append(span)
        self.num_held += 1
        while self.num_held > self._max_spans:
            self._forget_first()

    def _forget_old(self) -> None:
        too_old_s = self._clock() - self._max_age_s
        while self._held and next(iter(self._held.values()))[0] < too_old_s:
            self._forget_first()

    def _forget_first(self) -> None:
        self.num_forgotten += len(self._take(next(iter(self._held))))

    def _take(self, hold: int) -> list[ReadableSpan]:
        _, spans = self._held.pop(hold, (0.0, []))
        self.num_held -= len(spans)
        return spans
