"""Every placement that a request may have, and what each would cost everybody. Pure."""

from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from heapq import heapify, heappop
from operator import itemgetter
from typing import Final, NamedTuple

from diptych.step_model import StepWork
from router.placement.eligible import is_pair, usable
from router.placement.forecast import (
    DecodeForecast,
    PrefillForecast,
    Queue,
    Span,
    exposed_s,
    lasting_prompts_ratio,
    of_decode,
    of_prefill,
    of_prompts,
)
from router.placement.glance import (
    looks_apart_s,
    looks_to_wait_s,
    taken_alike,
    tells_decode,
    tells_prefill,
)
from router.placement.loss import (
    NO_TOLL,
    Bystanders,
    Consequences,
    Toll,
    handoff_waits,
    least_slow_ratio,
    num_kept_out,
    slow_ratio,
)
from router.placement.parting import Parting, Parts
from router.placement.policy import LeastLoaded
from router.placement.shortlist import near, partnered, soonest
from router.placement.told_paces import ToldPaces, told_paces
from router.placement.types import (
    DecodeView,
    Outlook,
    PrefillView,
    Query,
    Snapshot,
    WorkerId,
)

_ASTRAY = 0.3  # objectives: a worker of both roles does what is not its part
_PER_OBJECTIVE = 20  # differences that are smaller are left to seconds
_ROUNDING: Final = 1e-9  # of what is added in another order


class Loss(NamedTuple):
    """What a candidate costs all whom it concerns; the least is the best."""

    objectives: int  # twentieths of one that is missed because of it, by expectation
    seconds: float
    rank: bytes  # among equals


Candidate = tuple[Loss, Outlook]
_loss = itemgetter(0)


class Overheads(NamedTuple):
    """What things take beside steps, as learned. Seconds."""

    first_token_s: float
    handoff_s: float  # and beside its pull


class _Least(NamedTuple):
    """What one of a pair costs at the least, whatever the other one is."""

    objectives: float
    seconds: float


class _Source(NamedTuple):
    """A worker that would compute a prompt for another one."""

    view: PrefillView
    num_computed: int  # of the prompt's tokens, the last ones
    computed: PrefillForecast
    first_token: Span  # with what it takes beside steps
    late_ratio: float  # how likely that is later than it is wanted
    toll: Toll  # of those that decode there
    against: float  # objectives that speak against it, beside those that are missed
    rank: bytes  # among equals

    @property
    def least(self) -> _Least:
        num_lost = self.late_ratio + self.toll.missed.num_all + self.against
        return _Least(num_lost, self.first_token.expected_s + self.toll.seconds)


class _Decoder(NamedTuple):
    """A worker that would decode."""

    view: DecodeView
    pace: DecodeForecast
    told: ToldPaces
    num_kept_out: float  # prompts that ought to be computed there, and could not be
    rank: bytes  # among equals


class _Target(NamedTuple):
    """One that would decode what another worker computes."""

    decoder: _Decoder
    num_missing: int  # tokens
    step_s: float  # that runs there when they have come, without prompts; 0: none does
    prompts: Queue  # that it was given
    toll: Toll
    against: float

    def least(self, tpot_s: float | None, num_output_tokens: int) -> _Least:
        pace = self.decoder.pace.after
        num_lost = self.toll.missed.num_all + self.against + self.decoder.num_kept_out
        num_lost += least_slow_ratio(pace, tpot_s)
        return _Least(num_lost, num_output_tokens * pace.expected_s + self.toll.seconds)


# A pair, behind what it costs at the least, as of a Loss, and its number. A plain tuple: each
# placement makes hundreds.
_Bounded = tuple[tuple[int, float], int, _Source, _Target]


class Weighed:
    """The candidates of one request; a pair is looked at in full where its parts do not tell
    already that it is none of the best.
    """

    def __init__(
        self,
        alone: Sequence[Candidate],
        pairs: Sequence[_Bounded],
        look: Callable[[_Source, _Target], Candidate],
    ) -> None:
        """Of decode workers ``alone``; ``look`` is at one of the pairs."""
        self._alone, self._pairs, self._look = alone, pairs, look

    def __len__(self) -> int:
        return len(self._alone) + len(self._pairs)

    @property
    def soonest_s(self) -> float | None:
        """When the first token would come of whichever has it first; None: there is none."""
        alone = (outlook.ttft_s for _, outlook in self._alone)
        pairs = (source.first_token.expected_s for _, _, source, _ in self._pairs)
        return min((*alone, *pairs), default=None)

    def best(self, num: int) -> list[Candidate]:
        """So many that lose the least, in that order; fewer: there are no more."""
        found = sorted(self._alone, key=_loss)[:num]
        pairs = list(self._pairs)
        heapify(pairs)  # few of them are looked at
        while pairs:
            least, _, source, target = heappop(pairs)
            if len(found) == num and least > found[-1][0][:2]:
                break
            insort(found, self._look(source, target), key=_loss)
            del found[num:]
        return found

    def where(self, is_wanted: Callable[[WorkerId | None, WorkerId], bool]) -> list[Candidate]:
        """Those on such workers: for the prompt (None: the other one), and to decode."""
        alone = [each for each in self._alone if is_wanted(None, each[1].decode)]
        pairs = (
            self._look(source, target)
            for _, _, source, target in self._pairs
            if is_wanted(source.view.worker, target.decoder.view.worker)
        )
        return [*alone, *pairs]


def weigh(
    query: Query,
    snapshot: Snapshot,
    plain: LeastLoaded,
    parting: Parting,
    overheads: Overheads,
) -> Weighed | None:
    """Every candidate with its loss; None while a pool's steps are not known.

    Every pair of a prefill and a decode worker is one, and each decode worker that may compute
    prompts by itself. ``plain`` knows what prefixes are cached where; workers of both roles stay
    parted by ``parting``, or part anew.
    """
    whole = None if query.needs_prefill else parting.together(snapshot)
    snapshot = snapshot if whole is None else whole
    may_prefill, may_decode = usable(query, snapshot)
    prefills = taken_alike(may_prefill, "prefill")
    decodes = taken_alike(may_decode, "decode")
    if not prefills:  # who decodes computes all prompts, and learns by nothing else
        decodes = taken_alike(decodes, "prefill")
    if not (all(map(tells_prefill, prefills)) and all(map(tells_decode, decodes))):
        return None
    parts = parting.parts(snapshot)
    if whole is not None or not any(view.worker in parts.decoding for view in decodes):
        parts = Parts()  # nobody is there to decode for those who compute
    candidates = _Candidates(query, plain, parting, parts, overheads)
    return candidates.weighed(snapshot, prefills, decodes)


def prompt_work(query: Query, num_missing: int) -> StepWork:
    """What a worker that misses so many tokens would have to compute; the last one at the least."""
    num_cached = query.num_tokens - num_missing
    return StepWork.of_prompt(query.num_tokens, min(num_cached, query.num_tokens - 1))


class _Candidates:
    """Those of one request, where workers have these ``parts``."""

    def __init__(
        self,
        query: Query,
        plain: LeastLoaded,
        parting: Parting,
        parts: Parts,
        overheads: Overheads,
    ) -> None:
        self._query = query
        self._plain = plain
        self._parting = parting
        self._parts = parts
        self._overheads = overheads
        self._ttft_s, self._tpot_s = query.objectives[:2]
        self._num_output = query.num_answer_tokens
        self._missing: dict[WorkerId, int] = {}

    def weighed(
        self, snapshot: Snapshot, prefills: Sequence[PrefillView], decodes: Sequence[DecodeView]
    ) -> Weighed:
        query, parts = self._query, self._parts
        may_be_local = not query.needs_prefill and any(view.local_prefill for view in decodes)
        if not decodes or not (prefills or may_be_local):
            return Weighed((), (), self._pair)  # as long as all are full, many ask
        holders = self._plain.holders(query)
        near_p, near_d = partnered(
            near(prefills, holders, parts.decoding, looks_to_wait_s, self._num_missing),
            near(decodes, holders, parts.computing, looks_apart_s, self._num_missing),
            partial(is_pair, query),
        )
        computed = [
            (view, of_prefill(view, self._prompt(view.worker), query.now_s, num_passed))
            for view in near_p
            for num_passed in (view.num_passed_by(query.payer),)
        ]
        decoded = [(view, self._of_decode(view)) for view in near_d]
        known = [(view, forecast) for view, forecast in computed if forecast is not None]
        paces = [(view, forecast) for view, forecast in decoded if forecast is not None]
        few_p, few_d = partnered(
            soonest(known, parts.decoding, lambda each: each.first_token.expected_s),
            soonest(paces, parts.computing, lambda each: each.after.expected_s),
            lambda source, target: is_pair(query, source[0], target[0]),
        )
        decoders = [self._decoder(view, pace) for view, pace in few_d]
        told = {decoder.view.worker: decoder.told for decoder in decoders}
        sources = self._sources(snapshot, few_p, told)
        targets = [self._target(decoder) for decoder in decoders if sources]
        alone = [each for each in map(self._alone, decoders) if each is not None]
        return Weighed(alone, self._bounded(sources, targets), self._pair)

    def _bounded(self, sources: Sequence[_Source], targets: Sequence[_Target]) -> list[_Bounded]:
        """Every pair."""
        of_targets = [(each, *each.least(self._tpot_s, self._num_output)) for each in targets]
        pairs = list[_Bounded]()
        for source in sources:
            num_lost, seconds = source.least
            num_lost -= _ROUNDING
            for target, their_lost, their_s in of_targets:
                if is_pair(self._query, source.view, target.decoder.view):
                    at_least = round((num_lost + their_lost) * _PER_OBJECTIVE)
                    least_s = (seconds + their_s) * (1.0 - _ROUNDING)
                    pairs.append(((at_least, least_s), len(pairs), source, target))
        return pairs

    def _sources(
        self,
        snapshot: Snapshot,
        few: Sequence[tuple[PrefillView, PrefillForecast]],
        known: Mapping[WorkerId, ToldPaces],
    ) -> list[_Source]:
        num_tokens = self._query.num_tokens
        workers = {view.worker for view, _ in few}
        decoding = {view.worker: view for view in snapshot.decode if view.worker in workers}
        sources = []
        for view, computed in few:
            beside = decoding.get(view.worker)
            running = None if beside is None else of_decode(beside, num_tokens)
            toll, against = NO_TOLL, 0.0
            if beside is not None and running is not None:
                stalled_s = computed.stall_s(running.before.expected_s)
                there = running._replace(after=running.before)
                told = known.get(view.worker) or told_paces(beside, running, num_tokens)
                told = told.beside(computed)._replace(after=told.before)  # it decodes elsewhere
                toll = self._toll(Bystanders(there, stalled_s, beside.promised, told))
                is_astray = running.num_rows and view.worker in self._parts.decoding
                against = _ASTRAY * bool(is_astray)
            first = computed.first_token.later(self._overheads.first_token_s)
            num_computed = self._prompt(view.worker).num_prefill_tokens
            late_ratio, rank = self._late_ratio(first), self._plain.rank(view.worker)
            sources.append(
                _Source(view, num_computed, computed, first, late_ratio, toll, against, rank)
            )
        return sources

    def _decoder(self, view: DecodeView, pace: DecodeForecast) -> _Decoder:
        is_astray = view.worker in self._parts.computing
        num_kept_out = self._num_kept_out(view, pace) if is_astray else 0.0
        told = told_paces(view, pace, self._query.num_tokens)
        return _Decoder(view, pace, told, num_kept_out, self._plain.rank(view.worker))

    def _target(self, decoder: _Decoder) -> _Target:
        view, pace = decoder.view, decoder.pace
        return _Target(
            decoder,
            self._num_missing(view.worker),
            pace.before.expected_s if pace.num_rows else 0.0,
            of_prompts(view, self._query.now_s),
            self._toll(Bystanders(pace, 0.0, view.promised, decoder.told)),
            _ASTRAY * (view.worker in self._parts.computing),
        )

    def _of_decode(self, view: DecodeView) -> DecodeForecast | None:
        """Its pace there; of a worker whose part is to decode as if it went on with prompts only
        where the request does not keep them out.
        """
        num_tokens = self._query.num_tokens
        lasting = lasting_prompts_ratio(view, num_tokens)
        if view.worker not in self._parts.decoding or not lasting:
            return of_decode(view, num_tokens)
        plain = of_decode(view, num_tokens, 0.0)
        if plain is None:
            return None
        ratio = lasting * (1.0 - self._num_kept_out(view, plain))
        return of_decode(view, num_tokens, ratio)

    def _num_kept_out(self, view: DecodeView, pace: DecodeForecast) -> float:
        prompt_s = self._parting.prompt_s(view)
        return num_kept_out(prompt_s, pace.after, self._tpot_s, self._num_output)

    def _pair(self, source: _Source, target: _Target) -> Candidate:
        handoff_s = self._overheads.handoff_s
        handoff_s += exposed_s(
            source.view,
            target.decoder.view,
            target.num_missing,
            source.num_computed,
            source.computed,
        )
        waits_s = handoff_waits(source.first_token.expected_s, target.step_s, target.prompts)
        pace = target.decoder.pace.after
        slow = slow_ratio(pace, self._tpot_s, self._num_output, handoff_s, waits_s)
        wait_s = sum(waits_s) / (len(waits_s) or 1)
        tolls = (target.toll, source.toll)
        come = Consequences(
            source.first_token, source.late_ratio, pace, slow, tolls, handoff_s, wait_s
        )
        return self._valued(target.decoder, come, source.against + target.against, source)

    def _alone(self, decoder: _Decoder) -> Candidate | None:
        """The decode worker computes the prompt itself; None: it may not, or cannot tell yet."""
        view, pace, query = decoder.view, decoder.pace, self._query
        if not view.local_prefill or query.needs_prefill:
            return None
        computed = of_prefill(view, self._prompt(view.worker), query.now_s)
        if computed is None:
            return None
        first = computed.first_token.later(self._overheads.first_token_s)
        stalled_s = computed.stall_s(pace.before.expected_s)
        told = decoder.told.beside(computed)
        toll = self._toll(Bystanders(pace, stalled_s, view.promised, told))
        slow = slow_ratio(pace.after, self._tpot_s, self._num_output)
        come = Consequences(first, self._late_ratio(first), pace.after, slow, (toll,))
        is_astray = bool(pace.num_rows) and view.worker in self._parts.decoding
        is_astray |= view.worker in self._parts.computing
        return self._valued(decoder, come, _ASTRAY * is_astray)

    def _valued(
        self, decoder: _Decoder, come: Consequences, against: float, source: _Source | None = None
    ) -> Candidate:
        """What speaks against it beside those that it concerns: ``against``, in objectives, and
        prompts that it would keep out of where they ought to be computed. Without a source the
        decoder computes the prompt itself.
        """
        missed, seconds = come.missed, come.seconds(self._num_output)
        num_lost = missed.num_all + against + decoder.num_kept_out
        rank = decoder.rank if source is None else decoder.rank + source.rank
        outlook = Outlook(
            None if source is None else source.view.worker,
            decoder.view.worker,
            come.first_token.expected_s,
            come.pace.expected_s,
            missed.num_all,
            seconds,
            missed.num_barring + decoder.num_kept_out,
            missed.num_own,
            0.0 if source is None else come.gap_s,
        )
        return Loss(round(num_lost * _PER_OBJECTIVE), seconds, rank), outlook

    def _late_ratio(self, first_token: Span) -> float:
        return 0.0 if self._ttft_s is None else first_token.miss_ratio(self._ttft_s)

    def _toll(self, bystanders: Bystanders) -> Toll:
        return bystanders.toll(self._tpot_s, self._num_output)

    def _num_missing(self, worker: WorkerId) -> int:
        """Tokens of the prompt that are not cached there."""
        num = self._missing.get(worker)
        if num is None:
            num = self._missing[worker] = self._plain.num_missing(self._query, worker)
        return num

    def _prompt(self, worker: WorkerId) -> StepWork:
        """What ``worker`` would have to compute of it."""
        return prompt_work(self._query, self._num_missing(worker))
