"""Keeps a policy from being worse than the best fixed regime of the recent past. Pure.

A policy that foretells is as good as what it foretells by. Each placement says how many objectives
will be missed because of it; while that many are, the policy does what can be done, and no other
regime is looked at. Else what requests really had is compared
with what a fixed regime would have given them, by a replay of the same requests through queues
as fast as workers measured themselves, of which no learned law is a part. The replay is rough,
so a change is a trial: a regime that does not keep more objectives than was kept before it is
left, and not tried again for longer each time. So is one of which a trial learns nothing, as too
few requests come. One that stays is left before its time where it keeps less than half of what
it did.

Where hardly anything is as foretold and little is kept, what workers measured is what was made of
them, and a replay finds nothing better: then each fixed regime is tried in turn.
"""

import enum
import heapq
import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from router.placement.query import EndedRequest
from router.placement.views import Snapshot, WorkerId

LOOK_S: Final = 5.0  # between two looks
SURE_S: Final = 15.0  # that a regime has to look better before it is tried
TRIAL_S: Final = 20.0  # before a regime is judged by what it gave
STAY_S: Final = 60.0  # in a fixed regime, at first, before the policy is tried again
MOST_STAY_S: Final = 480.0  # and at the most
_NUM_LOOKS: Final = int(SURE_S // LOOK_S)  # over which steps are averaged: each is of one moment
_WINDOW_S: Final = 120.0
_PAUSE_S: Final = 5.0  # at the most counts of a time in which nobody comes
_MOST_SEEN: Final = 256  # requests
_MOST_SECONDS: Final = 1024  # in which some were placed
_LEAST_SEEN: Final = 16  # of which anything is said
_GAIN: Final = 1.1  # by which another has to be better
_SURPRISE: Final = 0.15  # objectives missed of a request, beside as many as were foretold
_DISMAY: Final = 0.4  # of these, so many that others are tried whatever the replay says
_FASTER: Final = 4.0  # than measured, as of many sequences at a time, a worker may be at the most
_LITTLE: Final = 0.5  # of requests that are kept
_FALLEN: Final = 0.5  # of what a fixed regime kept; bursts alone leave more of it


class Regime(enum.Enum):
    """How requests are placed."""

    FREE = "free"  # as the policy says
    APART = "apart"  # prompts on prefill workers; of workers of both roles on half of them
    TOGETHER = "together"  # prompts where they are decoded


class Rates(NamedTuple):
    """Of the workers, as they measured themselves. All but counts of those apart above 0."""

    num_prefill: int  # that do not decode
    num_decode: int  # of those, that compute prompts themselves where told to
    tokens_per_s: float  # of a prompt, on one worker
    step_s: float  # without parts of prompts
    num_both: int = 0  # workers, where each has both roles

    @property
    def num_apart(self) -> int:
        """That compute prompts and do nothing else, where these are apart."""
        return self.num_prefill or self.num_both // 2

    @classmethod
    def of(cls, snapshot: Snapshot) -> "Rates | None":
        """None: too little is known."""
        decoding = [view for view in snapshot.decode if view.local_prefill]
        computing = [view.tokens_per_s for view in snapshot.prefill if view.tokens_per_s]
        steps_s = [view.step_s for view in snapshot.decode if view.step_s]
        if not (decoding and computing and steps_s):
            return None
        both = {view.worker for view in decoding}
        return cls(
            sum(view.worker not in both for view in snapshot.prefill),
            len(decoding),
            sum(computing) / len(computing),
            sum(steps_s) / len(steps_s),
            len(both_alone(snapshot)),
        )


def both_alone(snapshot: Snapshot) -> Sequence[WorkerId]:
    """All workers, in order, where each has both roles, and every one of the second half can pull
    from some of the first; else none.
    """
    both = sorted(view.worker for view in snapshot.decode if view.local_prefill)
    is_each = {view.worker for view in snapshot.prefill} == set(both)
    if not is_each or len(both) < len(snapshot.decode):
        return ()
    computing = both[: len(both) // 2]
    sources = {worker.incarnation for worker in computing}
    decoding = (view for view in snapshot.decode if view.worker not in computing)
    return () if any(sources.isdisjoint(view.proven) for view in decoding) else both


def kept_ratio(regime: Regime, seen: Sequence[EndedRequest], rates: Rates) -> float:
    """Of these requests, in order of arrival, those that a fixed regime would have kept.

    Prompts are computed in order by whoever is free first. Where they are decoded as well,
    sequences wait for as much of the time as prompts take; that in which nobody comes is none.
    """
    num = rates.num_apart if regime is Regime.APART else rates.num_decode
    if not num:
        return 0.0
    tpot_s = rates.step_s
    if regime is Regime.TOGETHER:
        gaps_s = (after.came_s - before.came_s for before, after in itertools.pairwise(seen))
        length_s = max(1e-3, sum(min(gap_s, _PAUSE_S) for gap_s in gaps_s))
        busy_s = sum(each.num_prompt_tokens for each in seen) / rates.tokens_per_s
        tpot_s /= max(0.05, 1.0 - busy_s / (num * length_s))
    free_s = [0.0] * num
    num_kept = 0
    for each in seen:
        begin_s = max(each.came_s, free_s[0])
        first_s = begin_s + each.num_prompt_tokens / rates.tokens_per_s
        heapq.heapreplace(free_s, first_s)
        num_kept += each.objectives.kept_by(first_s - each.came_s + tpot_s, tpot_s)
    return num_kept / len(seen)


class _Foretold:
    """Of those that were placed within one second, all together."""

    __slots__ = ("at_s", "num", "num_missed", "num_own")

    def __init__(self, at_s: int) -> None:
        self.at_s = at_s
        self.num = 0
        self.num_missed = 0.0  # objectives, by expectation
        self.num_own = 0.0  # of these, their own


class _Told(NamedTuple):
    """The same of one of several, on average."""

    num_missed: float
    num_own: float

    @classmethod
    def of(cls, those: Sequence[_Foretold]) -> "_Told":
        num = sum(each.num for each in those) or 1
        return cls(sum(a.num_missed for a in those) / num, sum(a.num_own for a in those) / num)


class Guard:
    """Which regime it is now. Its clock is that of the requests it is told of."""

    def __init__(self) -> None:
        self.regime = Regime.FREE
        self._seen: deque[EndedRequest] = deque(maxlen=_MOST_SEEN)
        self._foretold: deque[_Foretold] = deque(maxlen=_MOST_SECONDS)
        self._now_s = 0.0
        self._since_s = 0.0  # in this regime
        self._looked_s = 0.0
        self._steps_s: deque[float] = deque(maxlen=_NUM_LOOKS)  # that took so long when it looked
        self._better_since_s: float | None = None  # another one looks so
        self._barred_until_s = 0.0  # no fixed regime is tried before
        self._stay_s = STAY_S
        self._wait_s = STAY_S
        self._before: tuple[Regime, float] | None = None  # on trial: the last regime, what it kept
        self._tried = Regime.APART  # last, of the fixed ones
        self._expected = 0.0  # in a fixed regime that stays: the ratio that it kept

    @property
    def is_due(self) -> bool:
        """Whether to look: seldom, and after something happened."""
        return self._now_s >= self._looked_s + LOOK_S

    def is_fixed(self) -> float:
        """1 in a fixed regime, else 0."""
        return float(self.regime is not Regime.FREE)

    def foretold(self, num_missed: float, num_own: float, now_s: float = 0.0) -> None:
        """One is placed, because of which so many objectives will be missed, by expectation; of
        these so many of its own. ``now_s``: after a pause the last one that ended ended long ago.
        """
        at_s = math.floor(max(self._now_s, now_s))
        if not self._foretold or self._foretold[-1].at_s < at_s:
            self._foretold.append(_Foretold(at_s))
        those = self._foretold[-1]
        those.num += 1
        those.num_missed += num_missed
        those.num_own += num_own

    def ended(self, seen: EndedRequest) -> None:
        """One request more."""
        self._seen.append(seen)
        self._now_s = max(self._now_s, seen.ended_s)
        if not self._since_s:
            self._since_s = self._looked_s = seen.came_s

    def look(self, rates: Rates | None) -> bool:
        """Decide; whether the regime became another."""
        if self._now_s > self._looked_s + 2 * LOOK_S:  # what looked better then is no longer sure
            self._better_since_s = None
            self._steps_s.clear()
        self._looked_s = self._now_s
        begun = [each for each in self._seen if each.came_s >= self._since_s]
        if rates is not None:
            rates = self._steadied(rates)
            begun = [each for each in begun if not _was_hopeless(each, rates)]
        recent = [each for each in begun if each.ended_s > self._now_s - _WINDOW_S]
        before = self.regime
        if self._before is not None:
            self._judge(begun, self._before)
        elif self.regime is Regime.FREE:
            self._doubt(recent, rates)
        else:
            self._watch(recent)
        return self.regime is not before

    def _steadied(self, rates: Rates) -> Rates:
        """With steps as at the latest looks: how many sequences share one is another soon."""
        self._steps_s.append(rates.step_s)
        return rates._replace(step_s=_mean(self._steps_s))

    def _judge(self, begun: Sequence[EndedRequest], before: tuple[Regime, float]) -> None:
        """What is on trial stays if it kept enough; else what was before it comes back.

        A fixed regime that keeps so much less that chance would hardly have it so ends at once.
        Where too few come for too long nothing is on trial any more, and it is the free one.
        """
        regime, ratio = before
        is_free, lasted_s = self.regime is Regime.FREE, self._now_s - self._since_s
        if len(begun) < _LEAST_SEEN:
            if lasted_s >= _WINDOW_S:
                self._before = None
                if not is_free:
                    self._bar()
            return
        kept = _ratio(begun)
        if lasted_s < TRIAL_S and (is_free or not _is_worse(begun, ratio)):
            return
        self._before = None
        if is_free and kept * _GAIN < ratio:
            self._stay_s = min(2 * self._stay_s, MOST_STAY_S)
            self._expected = ratio
            self._turn(regime)
        elif is_free:
            self._stay_s = STAY_S
        elif kept <= ratio * _GAIN:  # or by chance
            self._bar()
        else:
            self._wait_s = STAY_S
            self._expected = kept

    def _bar(self) -> None:
        """No fixed regime is tried for a while, for longer each time."""
        self._barred_until_s = self._now_s + self._wait_s
        self._wait_s = min(2 * self._wait_s, MOST_STAY_S)
        self._turn(Regime.FREE)

    def _watch(self, recent: Sequence[EndedRequest]) -> None:
        """The free regime is tried after a while, or once this one keeps far less than it did.

        Then what is to be beaten is what it keeps by now.
        """
        if self._now_s - self._since_s >= self._stay_s:
            self._turn(Regime.FREE, _ratio(recent))
            return
        num_late = sum(each.ended_s > self._now_s - TRIAL_S for each in recent)
        latest = recent[-max(num_late, _LEAST_SEEN) :]
        is_far_less = _ratio(latest) < _FALLEN * self._expected
        if len(latest) >= _LEAST_SEEN and is_far_less and _is_worse(latest, self._expected):
            self._turn(Regime.FREE, _ratio(latest[-_LEAST_SEEN:]))

    def _doubt(self, recent: Sequence[EndedRequest], rates: Rates | None) -> None:
        """Whether a fixed regime has been looking better for long enough."""
        is_early = len(recent) < _LEAST_SEEN or self._now_s < self._barred_until_s
        surprise = self._surprise(recent)
        if rates is None or is_early or surprise <= _SURPRISE:
            self._better_since_s = None
            return
        kept, ordered = _ratio(recent), sorted(recent, key=lambda each: each.came_s)
        ratios: Mapping[Regime, float] = {
            regime: kept_ratio(regime, ordered, rates) for regime in (Regime.APART, Regime.TOGETHER)
        }
        best = max(ratios, key=lambda each: ratios[each])
        is_known = ratios[best] > kept * _GAIN
        if not is_known:
            can_part = rates.num_apart > 0 and self._tried is Regime.TOGETHER
            best = Regime.APART if can_part else Regime.TOGETHER
        if not is_known and (surprise <= _DISMAY or kept >= _LITTLE):
            self._better_since_s = None
        elif self._better_since_s is None:
            self._better_since_s = self._now_s
        elif self._now_s - self._better_since_s >= SURE_S:
            self._turn(best, kept)

    def _surprise(self, recent: Sequence[EndedRequest]) -> float:
        """How many more objectives a request that was answered missed than was foretold, or fewer.

        Who foretells too much loses no more than what is refused for it. Of that only what requests
        miss themselves counts, as what several cost the same one is added up.
        """
        answered = [each for each in recent if each.ttft_s is not None]
        if not answered:
            return 1.0
        missed, foretold = _mean([each.num_missed for each in answered]), self._told_of(answered)
        unanswered_ratio = 1.0 - len(answered) / len(recent)
        unforeseen, unfounded = missed - foretold.num_missed, foretold.num_own - missed
        return max(unforeseen, min(unfounded, unanswered_ratio))

    def _told_of(self, answered: Sequence[EndedRequest]) -> _Told:
        """What was foretold when those were placed: of who came later nothing is known yet.

        Of so many that no two minutes of them are remembered each counts by when it came: those
        that ended together may have come long apart. Else those count that came before, too.
        """
        if len(self._seen) == _MOST_SEEN and self._seen[0].ended_s > self._now_s - _WINDOW_S:
            by_second = {each.at_s: each for each in self._foretold}
            seconds = (range(math.floor(a.came_s), math.floor(_first_s(a)) + 1) for a in answered)
            beside = ([by_second[at_s] for at_s in each if at_s in by_second] for each in seconds)
            told = [_Told.of(those) for those in beside if those]
            return _Told(_mean([a.num_missed for a in told]), _mean([a.num_own for a in told]))
        begin_s = min(self._now_s - _WINDOW_S, *(each.came_s for each in answered))
        begin_s, end_s = max(self._since_s, begin_s), max(map(_first_s, answered))
        return _Told.of([a for a in self._foretold if begin_s - 1.0 < a.at_s <= end_s])

    def _turn(self, regime: Regime, kept: float | None = None) -> None:
        """``kept``: of the regime that ends, for the trial that begins; None: it is none."""
        self._before = None if kept is None else (self.regime, kept)
        self.regime, self._since_s = regime, self._now_s
        if regime is not Regime.FREE:
            self._tried = regime
        self._better_since_s = None
        self._steps_s.clear()


def _was_hopeless(seen: EndedRequest, rates: Rates) -> bool:
    """Whether it had no answer, and no regime could have kept it: of that nothing is learned."""
    if seen.ttft_s is not None:
        return False
    step_s = rates.step_s / _FASTER
    prompt_s = seen.num_prompt_tokens / rates.tokens_per_s / _FASTER
    return not seen.objectives.kept_by(prompt_s + step_s, step_s)


def _first_s(seen: EndedRequest) -> float:
    """When it had its first token, of one that had."""
    return seen.came_s + (seen.ttft_s or 0.0)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _is_worse(seen: Sequence[EndedRequest], ratio: float) -> bool:
    """Than that, by more than chance would often have it."""
    return _ratio(seen) + 1.0 / math.sqrt(len(seen)) < ratio


def _ratio(seen: Sequence[EndedRequest]) -> float:
    return sum(each.is_kept for each in seen) / len(seen) if seen else 0.0
