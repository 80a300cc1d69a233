"""Spans of traces of which the router has not said yet whether they are to be sent."""

from collections import OrderedDict
from collections.abc import Callable

from diptych.telemetry.plain_span import PlainSpan
from diptych.telemetry.sampling import hold_of

MAX_SPANS = 8192  # that are held; the oldest traces make room
MAX_AGE_S = 900.0  # of a held trace: a router that has not spoken by then will not
_MAX_WORDS = 8192  # of routers that are remembered, for spans that end after them


class HeldSpans:
    """Passes on spans that are to be sent; keeps those that are held until ``decide``.

    Invariant: at most ``max_spans`` are held, none older than ``max_age_s`` is ever sent, and
    a span that ends after the word on its trace goes where the word sent the others. Called on
    the event loop's thread alone.
    """

    def __init__(
        self,
        send: Callable[[PlainSpan], None],
        clock: Callable[[], float],
        *,
        max_spans: int = MAX_SPANS,
        max_age_s: float = MAX_AGE_S,
    ) -> None:
        """``send`` takes what is to be sent; ``clock`` is monotonic, s."""
        self._send, self._clock = send, clock
        self._max_spans, self._max_age_s = max_spans, max_age_s
        self._held: OrderedDict[int, tuple[float, list[PlainSpan]]] = OrderedDict()
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
                self._send(span)

    def ended(self, span: PlainSpan) -> None:
        """Hold it, send it or drop it."""
        hold = hold_of(span.context)
        word = True if hold is None else self._words.get(hold)
        if hold is not None and word is None:
            self._hold(hold, span)
        elif word:
            self._send(span)

    def _hold(self, hold: int, span: PlainSpan) -> None:
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

    def _take(self, hold: int) -> list[PlainSpan]:
        _, spans = self._held.pop(hold, (0.0, []))
        self.num_held -= len(spans)
        return spans
