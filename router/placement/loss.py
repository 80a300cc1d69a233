"""What a placement costs everybody whom it concerns: objectives that are missed, seconds. Pure."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from router.placement.forecast import DecodeForecast, Queue, Span
from router.placement.promises import NOTHING_PROMISED, Promised
from router.placement.told_paces import NOTHING_TOLD, ToldPaces

_PARTS_OF_STEP: Final = (0.875, 0.625, 0.375, 0.125)  # one is as likely as another
_HARDLY: Final = 0.01  # of an objective, or of a pace: it makes no difference


class Missed(NamedTuple):
    """Objectives, by expectation."""

    num_all: float
    num_barring: float  # of these, its own and others' that are not tighter: that hold it
    num_own: float = 0.0  # of these, its own
    num_told: float = 0.0  # of all, of those that a worker told of


class Toll(NamedTuple):
    """What sequences on one worker lose to a request, all together."""

    missed: Missed = Missed(0.0, 0.0)
    seconds: float = 0.0  # by how much their answers come later


NO_TOLL: Final = Toll()


class Bystanders(NamedTuple):
    """Sequences on one worker that does something for the request: what it costs each of them."""

    pace: DecodeForecast  # after: with all that the request is there
    stalled_s: float = 0.0  # that each loses to the computing of its prompt, by that pace
    promised: Promised = NOTHING_PROMISED
    told: ToldPaces = NOTHING_TOLD

    def toll(self, tpot_s: float | None, num_output_tokens: int) -> Toll:
        """What a request with that pace and so long an answer costs them."""
        slower_s = self.pace.after.expected_s - self.pace.before.expected_s
        seconds = self.pace.num_rows * (self.stalled_s + num_output_tokens * slower_s)
        return Toll(self._missed(tpot_s, num_output_tokens), seconds)

    def _missed(self, tpot_s: float | None, num_output_tokens: int) -> Missed:
        """Objectives that they miss because of it.

        Of those that decode the worker tells how far they are, whosever they are. Those of this
        router that it has not told of have the pace that they were promised; of other routers'
        nothing is known, so they are taken to have the request's, but they bar nobody.
        """
        promised, others, barring = self.promised, 0.0, 0.0
        if tpot_s is not None:
            num_strangers = self.pace.num_rows - self.told.num_rows - promised.num_placed
            if num_strangers > 0:
                others += num_strangers * self._more_missed(tpot_s, num_output_tokens)
        for their_s, num_tokens, num in promised.paced:
            length = num_tokens or num_output_tokens
            more = self._more_missed(their_s, length)
            others += num * more
            if tpot_s is not None:
                is_tighter = their_s < tpot_s
                barring += num * (self._more_missed(tpot_s, length) if is_tighter else more)
        told = self.told.more_missed(tpot_s, num_output_tokens)
        return Missed(others + told.num_all, barring + told.num_barring, num_told=told.num_all)

    def _more_missed(self, tpot_s: float, num_output_tokens: int) -> float:
        """By how much it is likelier that one of them misses that pace."""
        theirs = self.pace.after.later(self.stalled_s / num_output_tokens)
        return max(0.0, theirs.miss_ratio(tpot_s) - self.pace.before.miss_ratio(tpot_s))


class Consequences(NamedTuple):
    """What would come of placing a request so, for it and for those beside it."""

    first_token: Span
    late_ratio: float  # how likely that is later than it wants it
    pace: Span  # between its own tokens
    slow_ratio: float  # how likely that is slower than it wants it, the hand-off counted
    tolls: Sequence[Toll]  # of those where it decodes, and where its prompt is computed
    handoff_s: float = 0.0  # between its first token and its second, beside steps
    wait_s: float = 0.0  # and for what runs where it goes on, as expected

    @property
    def missed(self) -> Missed:
        """Objectives: its own two, and those of each other."""
        num_own = num_all = num_barring = self.late_ratio + self.slow_ratio
        for toll in self.tolls:
            num_all += toll.missed.num_all
            num_barring += toll.missed.num_barring
        return Missed(num_all, num_barring, num_own)

    def seconds(self, num_output_tokens: int) -> float:
        """Until its answer is whole, and by how much the others' answers come later."""
        seconds = self.first_token.expected_s + self.handoff_s + self.wait_s
        seconds += num_output_tokens * self.pace.expected_s
        for toll in self.tolls:
            seconds += toll.seconds
        return seconds

    @property
    def gap_s(self) -> float:
        """Between its first token and its second, as expected."""
        return self.handoff_s + self.wait_s + self.pace.expected_s


def slow_ratio(
    pace: Span,
    tpot_s: float | None,
    num_output_tokens: int,
    handoff_s: float = 0.0,
    waits_s: Sequence[float] = (),
) -> float:
    """How likely so long an answer is slower than ``tpot_s``; None: no matter.

    The hand-off is one of the gaps, and one of the waits is as likely as another, the longest
    first; none: for nothing.
    """
    if tpot_s is None:
        return 0.0
    num_gaps = max(1, num_output_tokens - 1)
    left_s = tpot_s - handoff_s / num_gaps
    if not waits_s:
        return pace.miss_ratio(left_s)
    if waits_s[0] - waits_s[-1] < _HARDLY * num_gaps * left_s:  # of many tokens they are alike
        return pace.miss_ratio(left_s - sum(waits_s) / len(waits_s) / num_gaps)
    missed, spread = 0.0, pace.spread
    for wait_s in waits_s:
        ratio = spread.miss_ratio(left_s - wait_s / num_gaps)
        if ratio < _HARDLY:
            break
        missed += ratio
    return missed / len(waits_s)


def least_slow_ratio(pace: Span, tpot_s: float | None) -> float:
    """What :func:`slow_ratio` is at the least, whatever the hand-off and the waits are."""
    ratio = 0.0 if tpot_s is None else pace.miss_ratio(tpot_s)
    return ratio if ratio >= _HARDLY else 0.0


def handoff_waits(first_s: float, step_s: float, prompts: Queue) -> tuple[float, ...]:
    """What a sequence waits for where it goes on, the longest first, one as likely as another.

    ``first_s``: its first token comes then. ``step_s``: of those without prompts, some part of
    which is left. Prompts that were there before it are computed first, or beside it.
    """
    if not (prompts.step_s or prompts.behind_s):
        return tuple(part * step_s for part in _PARTS_OF_STEP) if step_s else ()
    queued = (part * prompts.step_s + prompts.behind_s - first_s for part in _PARTS_OF_STEP)
    parts = (part * step_s for part in _PARTS_OF_STEP)
    return tuple(max(left_s, part_s) for left_s, part_s in zip(queued, parts, strict=True))


def num_kept_out(
    prompt_s: float, pace: Span, tpot_s: float | None, num_output_tokens: int
) -> float:
    """Prompts, one at the most, that could not be computed beside an answer with that pace.

    A prompt takes so long (0: not known), and the answer would miss its pace if one were. That one
    comes meanwhile, and how long it waits, both go with the answer's length.
    """
    if tpot_s is None or not prompt_s:
        return 0.0
    part = min(1.0, num_output_tokens * pace.expected_s / prompt_s)
    return part * part * pace.later(prompt_s / num_output_tokens).miss_ratio(tpot_s)
