"""Sequences that decode somewhere, as their worker tells of them: what they can still lose. Pure.

What each has lost to prompts is in how far it is, and what it will lose to prompts that are there
is known; so a promise that one more prompt would break is seen, though each of those before
seemed small beside a long answer.
"""

from typing import Final, NamedTuple

from diptych.paced import Paced
from router.placement.forecast import (
    DecodeForecast,
    PrefillForecast,
    Span,
    of_decode,
    queued_stall_s,
)
from router.placement.views import DecodeView

# A sequence and a way in which it may go on, as it stands before anything comes: what it has left
# for its tokens, but for what it loses to prompts that are there, s; how likely it misses its pace.
# A plain tuple: each placement makes hundreds.
_One = tuple[Paced, float, float]


class MoreMissed(NamedTuple):
    """Paces that are missed because of a request, by expectation."""

    num_all: float
    num_barring: float  # if none had a tighter one than the request asks for


class ToldPaces(NamedTuple):
    """As of when the worker told. Times in s."""

    num_rows: int  # that decoded then, and do still
    ones: tuple[_One, ...]  # of these, who can lose the least
    before: Span  # between two tokens, but for prompts; as it is
    after: Span  # with one sequence more
    queued_s: float  # that each loses to prompts that are there
    stalled_s: float = 0.0  # and to one more, beside steps without any

    def beside(self, computed: PrefillForecast) -> "ToldPaces":
        """With that prompt computed there."""
        return self._replace(stalled_s=computed.stall_s(self.before.expected_s))

    def beside_elsewhere(self, computed: PrefillForecast) -> "ToldPaces":
        """With that prompt computed there for a worker that decodes it."""
        stalled_s = computed.stall_s(self.before.expected_s)
        return self._replace(after=self.before, stalled_s=stalled_s)

    def more_missed(self, tpot_s: float | None, num_output_tokens: int) -> MoreMissed:
        """With one more prompt, and for so many tokens one sequence more, which asks for that
        pace; None: for none, and nobody bars it.
        """
        total, barring, stalled_s = 0.0, 0.0, self.stalled_s
        after, surely_s = self.after.spread, self.after.surely_s
        for paced, left_s, missed in self.ones:
            num_more = paced.num_more
            token_s = (left_s - stalled_s) / num_more
            if token_s > surely_s:
                continue
            theirs = after
            if num_output_tokens < num_more:
                part = num_output_tokens / num_more
                theirs = self.before.towards(self.after, part).spread
            more = theirs.miss_ratio(token_s) - missed
            if more > 0.0:
                total += paced.share * more
            if tpot_s is not None:
                if paced.tpot_s < tpot_s:  # as if it had been promised no more than that
                    left_s = paced.left_s(tpot_s) - self.queued_s
                    more = theirs.miss_ratio((left_s - stalled_s) / num_more)
                    more -= self.before.miss_ratio(left_s / num_more)
                if more > 0.0:
                    barring += paced.share * more
        return MoreMissed(total, barring)


NOTHING_TOLD: Final = ToldPaces(0, (), Span(0.0, 0.0), Span(0.0, 0.0), 0.0)


def told_paces(view: DecodeView, pace: DecodeForecast, num_tokens: int) -> ToldPaces:
    """Of that worker, where ``pace`` is foretold for one of so many tokens more."""
    engine = view.engine
    if engine is None or engine.paced is None:
        return NOTHING_TOLD
    plain = pace
    if view.prefill_time_ratio:  # what prompts take is told of each
        plain = of_decode(view, num_tokens, 0.0) or pace
    queued_s = queued_stall_s(view, num_tokens, plain.before.expected_s)
    before, surely_s, ones = plain.before.spread, plain.before.surely_s, list[_One]()
    for paced in engine.paced:
        left_s = paced.left_s(paced.tpot_s) - queued_s
        token_s = left_s / paced.num_more
        missed = 0.0 if token_s > surely_s else before.miss_ratio(token_s)
        ones.append((paced, left_s, missed))
    num_rows = engine.decoding.num_decode_rows
    return ToldPaces(num_rows, tuple(ones), plain.before, plain.after, queued_s)
