"""Sequences that decode somewhere, as their worker tells of them: what they can still lose. Pure.

What each has lost to prompts is in how far it is, and what it will lose to prompts that are there
is known; so a promise that one more prompt would break is seen, though each of those before
seemed small beside a long answer.
"""

from dataclasses import replace
from typing import Final, NamedTuple

from diptych.paced import Paced
from router.placement.forecast import DecodeForecast, Span, of_decode, queued_stall_s
from router.placement.types import DecodeView


class ToldPaces(NamedTuple):
    """As of when the worker told."""

    num_rows: int  # that decoded then
    paced: tuple[Paced, ...]  # of these, who has the least to lose
    before: Span  # between two tokens, but for prompts; as it is
    after: Span  # with one sequence more
    queued_s: float  # that each loses to prompts that are there

    def more_missed(
        self, one: Paced, tpot_s: float, stalled_s: float, num_output_tokens: int
    ) -> float:
        """By how much it is likelier that it misses that pace, if it loses so much more, and
        one sequence more is there for so many tokens.
        """
        left_s, num_more = one.left_s(tpot_s) - self.queued_s, one.num_more
        token_s = (left_s - stalled_s) / num_more
        if self.after.surely_within(token_s):
            return 0.0
        theirs = self.before.towards(self.after, min(1.0, num_output_tokens / num_more))
        missed = theirs.miss_ratio(token_s) - self.before.miss_ratio(left_s / num_more)
        return max(0.0, missed)


NOTHING_TOLD: Final = ToldPaces(0, (), Span(0.0, 0.0), Span(0.0, 0.0), 0.0)


def told_paces(view: DecodeView, pace: DecodeForecast, num_tokens: int) -> ToldPaces:
    """Of that worker, where ``pace`` is foretold for one of so many tokens more."""
    engine = view.engine
    if engine is None or not engine.num_paced:
        return NOTHING_TOLD
    plain = pace
    if view.prefill_time_ratio:  # what prompts take is told of each
        plain = of_decode(replace(view, prefill_time_ratio=0.0), num_tokens) or pace
    queued_s = queued_stall_s(view, plain.before.expected_s)
    rows = engine.work.num_decode_rows
    return ToldPaces(rows, engine.paced, plain.before, plain.after, queued_s)
