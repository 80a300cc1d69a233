"""Which workers of both roles had best compute prompts, and which decode. Pure.

A worker that does both lets its sequences wait for each prompt, so it is better that some do the
one and some the other. How many is the split that saturates last, by the mix of requests of late
and by what steps take: that is as good in a burst as before it, so that a burst finds the workers
parted. It is a leaning, not a rule: what is foretold to be missed counts for more.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from itertools import islice
from statistics import fmean
from typing import Final, NamedTuple

from diptych.step_model import StepCost, StepModel
from router.placement.placement import Counted
from router.placement.query import Query
from router.placement.views import DecodeView, Snapshot, WorkerId

_PER_WORKER: Final = 8  # requests, that the mix is remembered of
_LEAST_REMEMBERED: Final = 32
_LEAST_SEEN: Final = 4  # before that nothing is said
_TWO: Final = 2  # workers, or paces
_NUM_ASKED: Final = 4  # workers, what their steps take
_STICKY: Final = 0.75  # workers: a change that is smaller is none,
_MOST_OF: Final = 0.9  # where those that are parted so saturate hardly sooner
_PROMPTS_OF_ONE: Final = 2.0  # that are computed while it waits: its own, and about one before it
_LEAST_DECODING: Final = 0.4  # of the sequences that a worker has to decode, so that several part
# Of two workers' time, that prompts take where these had best part, and by how much beyond that
# they stay parted: measured, and simulated with several mixes of requests and kinds of workers.
# Of few answers at a time little is won where they share steps, so no more than about half of the
# time may be prompts', as else the worker that decodes idles.
_LEAST_SHARE: Final = 0.5
_MOST_SHARE: Final = 0.72
_SHARE_OF_ROW: Final = 1 / 120  # beyond the least
_STICKY_SHARE: Final = 0.15
_HARDLY: Final = 1e-9  # of the time: what no worker measures right, and no share
_LEFT_OUT: Final = 8  # of so many paces the longest and the shortest
_FIXED_S: Final = 0.02  # about a step's constant: no token costs more than with a step for itself
# Answers that one worker makes at a time within their pace, so that two part, and stay parted: of
# a few one more or less is much, and a step's constant is shared by few.
_LEAST_ROWS: Final = 15.0
_LEAST_ROWS_APART: Final = 12.0


class Mix(NamedTuple):
    """Of requests, on average. Lengths in tokens."""

    num_prompt_tokens: float = 0.0  # to be computed
    num_attention_pairs: float = 0.0  # of those
    num_tokens: float = 0.0  # of prompts, cached ones too
    num_output_tokens: float = 0.0

    def towards(self, other: "Mix", weight: float) -> "Mix":
        """So much nearer to the other; 1: the other."""
        moved = (mine + weight * (its - mine) for mine, its in zip(self, other, strict=True))
        return Mix(*moved)

    def prompt_s(self, cost: StepCost, max_batched_tokens: int) -> float:
        """What one takes of a worker that computes nothing else, in full steps."""
        return (
            self.num_prompt_tokens / max_batched_tokens * cost.fixed_s
            + self.num_prompt_tokens * cost.prefill_token_s
            + self.num_attention_pairs * cost.attention_pair_s
        )

    def answer_s(self, cost: StepCost, max_num_seqs: int, tpot_s: float) -> float:
        """What one takes of a worker that decodes as many at a time as nine of ten keep pace."""
        num_rows = self.num_rows(cost, max_num_seqs, tpot_s)
        shared_s = (cost.fixed_s + cost.rows_s(num_rows)) / num_rows
        own_s = self._num_context_tokens * cost.context_token_s
        return self.num_output_tokens * (shared_s + own_s)

    def num_rows(self, cost: StepCost, max_num_seqs: int, tpot_s: float) -> float:
        """Answers at a time of which nine of ten keep that pace, one at the least."""
        left_s = tpot_s / cost.upper_ratio - cost.fixed_s
        num_rows = cost.more_rows(left_s, 0, self._num_context_tokens)
        return max(1.0, min(max_num_seqs, num_rows))

    @property
    def _num_context_tokens(self) -> float:
        """That each of its tokens attends to."""
        return self.num_tokens + self.num_output_tokens / 2


class Parts(NamedTuple):
    """Of the workers of both roles; empty: each does what it is foretold to do best."""

    computing: frozenset[WorkerId] = frozenset()
    decoding: frozenset[WorkerId] = frozenset()


class _Paces:
    """Those that requests of late wanted, s.

    On average of what a token costs, about one over its pace: those that want hardly any do not
    weigh more than others. One that nobody else wants does not count at all.
    """

    def __init__(self) -> None:
        self.mean_s: float | None = None
        """On average, without the few on either side; None: nobody wanted any."""
        self._newest = deque[float]()  # costs
        self._ordered: list[float] = []

    def add(self, tpot_s: float, most: int) -> None:
        """One more, the last of so many."""
        cost = 1.0 / (tpot_s + _FIXED_S)
        self._newest.append(cost)
        insort(self._ordered, cost)
        while len(self._newest) > most:
            del self._ordered[bisect_left(self._ordered, self._newest.popleft())]
        num = len(self._ordered)
        num_left_out = max(num // _LEFT_OUT, int(num > _TWO))
        self.mean_s = 1.0 / fmean(self._ordered[num_left_out : num - num_left_out]) - _FIXED_S


class _Known(NamedTuple):
    """What a worker tells of its steps."""

    model: StepModel
    max_batched_tokens: int
    max_num_seqs: int


class _Phases(NamedTuple):
    """Whose steps tell of a phase: of some that compute prompts, of some that decode."""

    prompts: Sequence[_Known]
    answers: Sequence[_Known]


class _Wanted(NamedTuple):
    """How many workers of both roles had best compute prompts."""

    share: float  # of the work that is prompts, neither 0 nor 1
    num_prefill: int  # workers that do nothing else
    num_decode: int  # that can decode, those of both roles too
    least: int
    most: int

    @property
    def num(self) -> float:
        """So many that both phases saturate together."""
        num = (self.num_prefill + self.num_decode) * self.share - self.num_prefill
        return min(max(num, self.least), self.most)

    @property
    def best(self) -> int:
        """Of whole ones: of few workers one more or less is much for the phase that has less."""
        below = math.floor(self.num)
        return max(below, min(below + 1, self.most), key=self._saturates_at)

    def is_as_good(self, num: int, best: int) -> bool:
        """Whether so many saturate hardly sooner than the best."""
        return self._saturates_at(num) >= _MOST_OF * self._saturates_at(best)

    def _saturates_at(self, num: int) -> float:
        """Work, in workers, that the phase can do that saturates first, beside its share of it."""
        computing, decoding = self.num_prefill + num, self.num_decode - num
        return min(computing / self.share, decoding / (1.0 - self.share))


class Parting:
    """One router's: what requests were like of late, and the parts that follow from it.

    All routers that see the same mix and the same workers part them alike.
    """

    def __init__(self) -> None:
        self._mix = Mix()
        self._paces = _Paces()
        self._num_seen = 0
        self._faded = 0.0  # logarithm of how much the first of all has by now
        self._parts = Parts()
        self._are_two_apart = False

    def learn(self, query: Query, num_missing: int, num_workers: int) -> Counted:
        """One was placed that lacks so many tokens where its prompt is computed; how it counts.

        The last one is computed in any case. Its answer counts as expected until it is whole.
        """
        num_missing = max(1, num_missing)
        num_cached = query.num_tokens - num_missing
        num_pairs = (query.num_tokens**2 - num_cached**2) / 2
        one = Mix(num_missing, num_pairs, query.num_tokens, query.num_answer_tokens)
        self._num_seen += 1
        most = max(_LEAST_REMEMBERED, _PER_WORKER * num_workers)
        weight = 1.0 / min(self._num_seen, most)
        self._mix = self._mix.towards(one, weight)
        if weight < 1.0:
            self._faded += math.log1p(-weight)
        tpot_s = query.objectives.tpot_s
        if tpot_s is not None:
            self._paces.add(tpot_s, most)
        return Counted(query.num_answer_tokens, weight, self._faded)

    def answered(self, counted: Counted, num_tokens: int) -> None:
        """The answer to one that was ``counted`` so has so many tokens.

        What clients allow goes with what they get, so expectations, of which it is a bound, may be
        too low all together.
        """
        weight = counted.weight * math.exp(self._faded - counted.faded)
        more = weight * (num_tokens - counted.num_output_tokens)
        self._mix = self._mix._replace(num_output_tokens=self._mix.num_output_tokens + more)

    def together(self, snapshot: Snapshot) -> Snapshot | None:
        """Each worker for itself, where nothing is won by parting; None: they had best part.

        Two workers can part in one way only. Where one phase takes much more than half of the work
        its worker is short of time while the other one idles, so each does both. So does each of
        several where answers take hardly longer than prompts: who decodes would have its places
        full of sequences that wait for those.
        """
        if not snapshot.prefill:
            return None
        computing = {view.worker for view in snapshot.prefill}
        decoding = {view.worker for view in snapshot.decode if view.local_prefill}
        if computing != decoding or len(decoding) < len(snapshot.decode):
            return None  # one has but one role
        if len(decoding) > _TWO and self._several_had_best_part(snapshot):
            return None
        if len(decoding) == _TWO and self._two_had_best_part(snapshot):
            return None
        return snapshot.each_alone

    def parts(self, snapshot: Snapshot) -> Parts:
        """As of now."""
        computing = {view.worker for view in snapshot.prefill}
        both = {view.worker for view in snapshot.decode if view.worker in computing}
        if not both or self._num_seen < _LEAST_SEEN:
            return Parts()
        wanted = self._wanted(snapshot, len(computing) - len(both), len(both))
        if wanted is None:
            return Parts()
        known, num = self._parts.computing | self._parts.decoding, len(self._parts.computing)
        best = wanted.best
        is_near = abs(wanted.num - num) <= _STICKY
        if len(known) != len(both) or not (is_near and wanted.is_as_good(num, best)):
            num = best
        if both != known or num != len(self._parts.computing):
            ordered = sorted(both, key=lambda worker: worker.incarnation)
            self._parts = Parts(frozenset(ordered[:num]), frozenset(ordered[num:]))
        return self._parts

    def prompt_s(self, view: DecodeView) -> float:
        """What a prompt as of late takes there; 0: not known."""
        engine = view.engine
        if engine is None or not engine.max_batched_tokens or not self._num_seen:
            return 0.0
        return self._mix.prompt_s(engine.model.prefill, engine.max_batched_tokens)

    def _wanted(self, snapshot: Snapshot, num_prefill: int, num_both: int) -> "_Wanted | None":
        """None: not known. ``num_prefill``: workers that compute prompts only."""
        known = _known(snapshot.decode)
        share = self._share(_Phases(known, known))
        if share is None:
            return None
        share /= share + (1.0 - share) / self._decoding_ratio(known)
        least = 0 if num_prefill else 1
        most = num_both - (len(snapshot.decode) == num_both)
        return _Wanted(share, num_prefill, len(snapshot.decode), least, most)

    def _decoding_ratio(self, known: Sequence[_Known]) -> float:
        """Of the sequences that a worker has to decode, those that do: it has the others from when
        they are placed until their prompts are computed, which takes as much of its places the
        shorter answers are.
        """
        answer_s = self._mix.num_output_tokens * (self._paces.mean_s or 0.0)
        prompt_s = fmean([self._mix.prompt_s(cost.prefill, num) for cost, num, _ in known])
        return answer_s / (answer_s + _PROMPTS_OF_ONE * prompt_s)

    def _several_had_best_part(self, snapshot: Snapshot) -> bool:
        """They had until it is known that they have not."""
        known = _known(snapshot.decode)
        is_known = self._share(_Phases(known, known)) is not None
        return not is_known or self._decoding_ratio(known) >= _LEAST_DECODING

    def _two_had_best_part(self, snapshot: Snapshot) -> bool:
        were_apart = self._are_two_apart
        phases = self._phases(snapshot, were_apart)
        share, num_rows = self._share(phases), self._num_rows(phases)
        more = _STICKY_SHARE * were_apart
        least_rows = _LEAST_ROWS_APART if were_apart else _LEAST_ROWS
        most_share = min(_MOST_SHARE, _LEAST_SHARE + _SHARE_OF_ROW * num_rows)
        self._are_two_apart = (
            share is not None
            and _LEAST_SHARE - more <= share <= most_share + more
            and num_rows >= least_rows
        )
        return self._are_two_apart

    def _phases(self, snapshot: Snapshot, are_apart: bool) -> _Phases:
        """Of all; where they are apart each of its own, as it learns no more of the other one."""
        views, parts = snapshot.decode, self._parts
        if not are_apart or {view.worker for view in views} != parts.computing | parts.decoding:
            known = _known(views)
            return _Phases(known, known)
        computing = [view for view in views if view.worker in parts.computing]
        return _Phases(_known(computing), _known([view for view in views if view not in computing]))

    def _num_rows(self, phases: _Phases) -> float:
        """Answers as of late, at a time on one worker, on average; 0: not known."""
        tpot_s, known = self._paces.mean_s, phases.answers
        if not known or tpot_s is None:
            return 0.0
        return fmean([self._mix.num_rows(cost.decode, most, tpot_s) for cost, _, most in known])

    def _share(self, phases: _Phases) -> float | None:
        """Of all that requests as of late take of workers, what prompts do; None: not known."""
        tpot_s = self._paces.mean_s
        if not all(phases) or tpot_s is None or self._num_seen < _LEAST_SEEN:
            return None
        mix, (prompts, answers) = self._mix, phases
        prompts_s = fmean([mix.prompt_s(cost.prefill, num) for cost, num, _ in prompts])
        answers_s = fmean([mix.answer_s(cost.decode, most, tpot_s) for cost, _, most in answers])
        # Prompts that are cached whole are none; of one phase alone there is no share.
        share = prompts_s / (prompts_s + answers_s) if prompts_s and answers_s else 0.0
        return share if _HARDLY < share < 1.0 - _HARDLY else None


def _known(views: Sequence[DecodeView]) -> list[_Known]:
    """Of the first few that tell of both kinds of steps: what one learned of late varies."""
    told = (
        _Known(engine.model, engine.max_batched_tokens, view.max_num_seqs or 2**20)
        for view in views
        for engine in (view.engine,)
        if engine is not None and engine.max_batched_tokens
        if engine.model.prefill.is_known and engine.model.decode.is_known
    )
    return list(islice(told, _NUM_ASKED))
