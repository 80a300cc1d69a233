"""Placement by what is predicted to be lost: objectives first, then everybody's seconds. Pure."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from heapq import nsmallest
from typing import NamedTuple

from diptych.step_model import StepWork
from router.placement.eligible import is_pair, usable
from router.placement.explanation import Explanation
from router.placement.forecast import (
    DecodeForecast,
    PrefillForecast,
    Queue,
    Span,
    alone_s,
    exposed_s,
    of_decode,
    of_prefill,
    of_prompts,
)
from router.placement.glance import (
    has_all_room,
    idle,
    looks_apart_s,
    looks_to_wait_s,
    prompt_token_s,
    taken_alike,
    tells_decode,
    tells_prefill,
    with_room,
)
from router.placement.loss import (
    NO_TOLL,
    Bystanders,
    Consequences,
    Toll,
    handoff_waits,
    num_kept_out,
    slow_ratio,
)
from router.placement.overhead import Overhead
from router.placement.parting import Parting, Parts
from router.placement.policy import LeastLoaded
from router.placement.probes import Probes, most_slowed, perhaps_in_time
from router.placement.shortlist import NUM_HOLDERS, NUM_WEIGHED, near, soonest
from router.placement.told_paces import ToldPaces, told_paces
from router.placement.types import (
    NO_OBJECTIVES,
    DecodeOnly,
    DecodeView,
    Forecast,
    Outlook,
    Paired,
    Placement,
    PrefillView,
    Query,
    Seen,
    Snapshot,
    Unreachable,
    Why,
    WorkerId,
)
from router.placement.unreachable import too_late, too_slow

_ASTRAY = 0.3  # objectives: a worker of both roles does what is not its part
_NUM_TOLD = 4  # candidates that a forecast names, the best
_PER_OBJECTIVE = 20  # differences that are smaller are left to seconds
_MOST_MISSED = 0.5  # objectives because of one request, of those that may be refused


class _Loss(NamedTuple):
    """What a candidate costs all whom it concerns; the least is the best."""

    objectives: int  # twentieths of one that is missed because of it, by expectation
    seconds: float
    rank: bytes  # among equals


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


class _Target(NamedTuple):
    """A worker that would decode what another one computes."""

    view: DecodeView
    pace: Span
    told: ToldPaces
    num_missing: int  # tokens
    step_s: float  # that runs there when they have come, without prompts; 0: none does
    prompts: Queue  # that it was given
    toll: Toll
    against: float
    kept_out: float
    num_output: int  # tokens of the answer, by expectation
    rank: bytes  # among equals


class _Held(NamedTuple):
    """One that was not placed: what it asked for but objectives, and when it could begin."""

    query: Query
    snapshot: Snapshot
    ttft_s: float  # the least


class Predicted:
    """The pair, or the decode worker alone, with the least predicted loss.

    Every pair of a prefill and a decode worker is a candidate, and each decode worker that may
    compute prompts by itself. Of each the time to the first token is rolled out, the time
    between tokens at hand-off, and what the request does to sequences that run there: a row more
    in each step, and steps with parts of its prompt. Objectives that these break, ours included,
    count first; without objectives, and among equals, seconds do.

    What first tokens take beside steps (messages, what steps do not tell of themselves) is learned
    from those that came, and what a hand-off takes beside its pull from second ones.

    Whatever is not a fresh placement, and all placements while the steps of no worker of a pool
    are known, or one says nothing of them, are ``plain``'s, which also knows what prefixes are
    cached where.
    """

    def __init__(self, plain: LeastLoaded, chance: Callable[[], float] = lambda: 0.5) -> None:
        """``chance`` is uniform in [0, 1): who is refused together does not come back together."""
        self._plain = plain
        self.cache = plain.cache
        self._chance = chance
        self._parting = Parting()
        self._overhead = Overhead()
        self._handoff_overhead = Overhead()
        self._probes = Probes()
        self._held: _Held | None = None  # that was not placed last
        self.has_declined = False  # see Policy

    def forget(self, worker: WorkerId) -> None:
        """See :class:`router.placement.types.Policy`."""
        self._plain.forget(worker)
        self._probes.forget(worker)

    def place(self, query: Query, snapshot: Snapshot) -> Placement | None:
        """See :class:`router.placement.types.Policy`."""
        self.has_declined = False
        self._handoff_overhead.age(query.now_s)
        if self._is_plain(query, snapshot):
            return self._plain.place(query, snapshot)
        weighed = self._weigh(query, snapshot, is_real=not query.takes_spare_only)
        if not weighed:
            return self._plain.place(query, snapshot)
        best = nsmallest(_NUM_TOLD, weighed, key=lambda each: each[0])
        is_probe = False
        if query.may_refuse and best[0][1].num_barring > _MOST_MISSED:
            overhead_s = self._overhead.expected_s
            tried = perhaps_in_time(weighed, query.objectives, snapshot, overhead_s)
            is_probe = not tried
            if is_probe:
                idle = {view.worker for view in snapshot.decode if not view.num_sequences}
                due = idle.intersection(self._probes.due)
                tried = [each for each in weighed if each[1].decode in due]
                if not tried and not self._probes.is_due:
                    ttft_s = min(outlook.ttft_s for _, outlook in weighed)
                    self._held = _Held(_aimless(query), snapshot, ttft_s)
                    self.has_declined = True
                    return None
                self._probes.probed()
            best = nsmallest(_NUM_TOLD, tried or weighed, key=lambda each: each[0])
        chosen = best[0][1]
        self._probes.placed(chosen.prefill, chosen.decode)
        num_missing = self._plain.num_missing(query, chosen.prefill or chosen.decode)
        num_workers = max(len(snapshot.prefill), len(snapshot.decode))
        self._parting.learn(query, num_missing, num_workers)
        told = tuple(candidate for _, candidate in best)
        overheads = self._overhead.expected_s, self._handoff_overhead.expected_s
        forecast = Forecast(chosen, told, *overheads, is_probe)
        if chosen.prefill is not None:
            return Paired(chosen.prefill, chosen.decode, forecast)
        why = Why.NO_PREFILL if _lacks_prefill(snapshot) else Why.CHOICE
        return DecodeOnly(chosen.decode, why, query.num_tokens - num_missing, forecast)

    def foresee(self, query: Query, snapshot: Snapshot, wait_s: float) -> Unreachable | None:
        """See :class:`router.placement.types.Policy`.

        A first token that would be late now is later the later it begins. A decode worker that
        is too slow for one more may be fast enough once others have ended, so it is waited for
        as long as the first token can be in time, unless it would be too slow for one alone.

        Where many were refused one is tried: see :class:`router.placement.probes.Probes`.
        """
        found = None if self._is_plain(query, snapshot) else self._lost(query, snapshot, wait_s)
        if found is not None:
            busy = {view.worker for view in snapshot.decode if view.num_sequences}
            idle = (view for view in snapshot.decode if view.worker not in busy)
            self._probes.refused({v.worker for v in idle if _is_too_slow(v, query)}, busy)
        return found

    def _is_plain(self, query: Query, snapshot: Snapshot) -> bool:
        """Whether it is a placement of which nothing is foretold."""
        bound = not query.is_fresh or query.prefill_alone or query.beside is not None
        return bound or (_lacks_prefill(snapshot) and not self._plain.allow_local)

    def _lost(self, query: Query, snapshot: Snapshot, wait_s: float) -> Unreachable | None:
        within_s, tpot_s, whole_s = query.objectives
        soonest_s = self._soonest_s(query, snapshot, wait_s)
        if soonest_s is None:
            return None
        overhead_s = self._overhead.expected_s
        slowed = most_slowed(*(snapshot.prefill or snapshot.decode))
        least_s = wait_s + overhead_s + (soonest_s - overhead_s) / slowed
        if within_s is not None and least_s > within_s:
            is_hopeless = self._alone_s(query, snapshot) / slowed > (
                within_s if whole_s is None else whole_s
            )
            chance = None if is_hopeless else self._chance
            return too_late(wait_s + soonest_s, query.objectives, chance)
        paces = [(view, alone_s(view, query.num_tokens)) for view in snapshot.decode]
        known = [(view, pace_s) for view, pace_s in paces if pace_s is not None]
        if tpot_s is None or not known or len(known) < len(paces):
            return None
        if min(pace_s / most_slowed(view) for view, pace_s in known) <= tpot_s:
            return None
        return too_slow(min(pace_s for _, pace_s in known), tpot_s)

    def _soonest_s(self, query: Query, snapshot: Snapshot, wait_s: float) -> float | None:
        """When its first token would come if every worker had room; None: it is not known.

        What ``place`` weighed just now is not weighed again where that suffices: all workers have
        room, or one of those that have is early enough.
        """
        held, self._held = self._held, None
        if held is not None and held.snapshot is snapshot and held.query == _aimless(query):
            within_s = query.objectives.ttft_s
            is_early = within_s is None or wait_s + held.ttft_s <= within_s
            if is_early or has_all_room(snapshot):
                return held.ttft_s
        weighed = self._weigh(query, with_room(snapshot), is_real=False)
        return min((outlook.ttft_s for _, outlook in weighed), default=None)

    def _alone_s(self, query: Query, snapshot: Snapshot) -> float:
        """Its first token on workers that have nothing else to do, the fastest that is known."""
        views: list[PrefillView | DecodeView] = [*snapshot.prefill]
        if not query.needs_prefill:
            views += [view for view in snapshot.decode if view.local_prefill]
        fast = nsmallest(NUM_WEIGHED, views, key=prompt_token_s)
        holders = self._plain.holders(query)
        having = [view for view in views if view.worker.incarnation in holders and view not in fast]
        computed = [
            of_prefill(idle(view), self._prompt(query, view.worker), query.now_s)
            for view in [*fast, *having[:NUM_HOLDERS]]
        ]
        first_s = [each.first_token.expected_s for each in computed if each is not None]
        return self._overhead.expected_s + min(first_s, default=0.0)

    def came_true(self, forecast: Forecast, ttft_s: float) -> None:
        """See :class:`router.placement.types.Policy`."""
        self._probes.came()
        foretold_s = forecast.chosen.ttft_s - forecast.overhead_s
        self._overhead.came_true(ttft_s, foretold_s, is_probe=forecast.is_probe)

    def went_on(self, forecast: Forecast, gap_s: float) -> None:
        """See :class:`router.placement.types.Policy`."""
        foretold_s = forecast.chosen.gap_s - forecast.handoff_overhead_s
        self._handoff_overhead.came_true(gap_s, foretold_s)

    def ended_as(self, seen: Seen) -> None:
        """See :class:`router.placement.types.Policy`. First tokens have taught it."""

    def explain(self, query: Query, snapshot: Snapshot, placement: Placement) -> Explanation:
        """See :class:`router.placement.types.Policy`. What was foretold is in the placement."""
        return self._plain.explain(query, snapshot, placement)

    def _weigh(
        self, query: Query, snapshot: Snapshot, *, is_real: bool = True
    ) -> list[tuple[_Loss, Outlook]]:
        """Every candidate with its loss; none while a pool's steps are not known.

        Workers part by a real snapshot alone.
        """
        parting = self._parting if is_real else copy(self._parting)
        whole = None if query.needs_prefill else parting.together(snapshot)
        snapshot = snapshot if whole is None else whole
        may_prefill, may_decode = usable(query, snapshot)
        prefills = taken_alike(may_prefill, "prefill")
        decodes = taken_alike(may_decode, "decode")
        if not prefills:  # who decodes computes all prompts, and learns by nothing else
            decodes = taken_alike(decodes, "prefill")
        if not (all(map(tells_prefill, prefills)) and all(map(tells_decode, decodes))):
            return []
        holders = self._plain.holders(query)
        parts = parting.parts(snapshot)
        if whole is not None or not any(view.worker in parts.decoding for view in decodes):
            parts = Parts()  # nobody is there to decode for those who compute
        missing = partial(self._plain.num_missing, query)
        near_p = near(prefills, holders, parts.decoding, looks_to_wait_s, missing)
        near_d = near(decodes, holders, parts.computing, looks_apart_s, missing)
        computed = [
            (view, of_prefill(view, self._prompt(query, view.worker), query.now_s, num_passed))
            for view in near_p
            for num_passed in (view.num_passed_by(query.payer),)
        ]
        decoded = [(view, self._of_decode(query, view, parts)) for view in near_d]
        known = [(view, forecast) for view, forecast in computed if forecast is not None]
        paces = [(view, forecast) for view, forecast in decoded if forecast is not None]
        few_p = soonest(known, parts.decoding, lambda each: each.first_token.expected_s)
        few_d = soonest(paces, parts.computing, lambda each: each.after.expected_s)
        targets = [self._target(query, view, pace, parts) for view, pace in few_d]
        told = {target.view.worker: target.told for target in targets}
        sources = self._sources(query, snapshot, few_p, parts, told)
        pairs = (
            self._pair(query, source, target)
            for source in sources
            for target in targets
            if is_pair(query, source.view, target.view)
        )
        there = zip(few_d, targets, strict=True)
        alone = (self._alone(query, pace, target, parts) for (_, pace), target in there)
        return [*pairs, *(each for each in alone if each is not None)]

    def _sources(
        self,
        query: Query,
        snapshot: Snapshot,
        few: Sequence[tuple[PrefillView, PrefillForecast]],
        parts: Parts,
        known: Mapping[WorkerId, ToldPaces],
    ) -> list[_Source]:
        workers = {view.worker for view, _ in few}
        decoding = {view.worker: view for view in snapshot.decode if view.worker in workers}
        sources = []
        for view, computed in few:
            beside = decoding.get(view.worker)
            running = None if beside is None else of_decode(beside, query.num_tokens)
            toll, against = NO_TOLL, 0.0
            if beside is not None and running is not None:
                stalled_s = computed.stall_s(running.before.expected_s)
                there = running._replace(after=running.before)
                told = known.get(view.worker) or told_paces(beside, running, query.num_tokens)
                told = told.beside(computed)._replace(after=told.before)  # it decodes elsewhere
                toll = _toll(query, Bystanders(there, stalled_s, beside.promised, told))
                against = _ASTRAY * bool(running.num_rows and view.worker in parts.decoding)
            first = computed.first_token.later(self._overhead.expected_s)
            late_ratio = _late_ratio(query, first)
            num_computed = self._prompt(query, view.worker).num_prefill_tokens
            rank = self._plain.rank(view.worker)
            sources.append(
                _Source(view, num_computed, computed, first, late_ratio, toll, against, rank)
            )
        return sources

    def _target(
        self, query: Query, view: DecodeView, pace: DecodeForecast, parts: Parts
    ) -> _Target:
        told = told_paces(view, pace, query.num_tokens)
        toll = _toll(query, Bystanders(pace, 0.0, view.promised, told))
        num_missing = self._plain.num_missing(query, view.worker)
        step_s = pace.before.expected_s if pace.num_rows else 0.0
        is_astray = view.worker in parts.computing
        kept_out = self._num_kept_out(query, view, pace) if is_astray else 0.0
        against = _ASTRAY * is_astray
        return _Target(
            view,
            pace.after,
            told,
            num_missing,
            step_s,
            of_prompts(view, query.now_s),
            toll,
            against,
            kept_out,
            _num_output(query),
            self._plain.rank(view.worker),
        )

    def _of_decode(self, query: Query, view: DecodeView, parts: Parts) -> DecodeForecast | None:
        """Its pace there; of a worker whose part is to decode as if it went on with prompts only
        where the request does not keep them out.
        """
        if view.worker not in parts.decoding or not view.prefill_time_ratio:
            return of_decode(view, query.num_tokens)
        plain = of_decode(replace(view, prefill_time_ratio=0.0), query.num_tokens)
        if plain is None:
            return None
        ratio = view.prefill_time_ratio * (1.0 - self._num_kept_out(query, view, plain))
        return of_decode(replace(view, prefill_time_ratio=ratio), query.num_tokens)

    def _num_kept_out(self, query: Query, view: DecodeView, pace: DecodeForecast) -> float:
        prompt_s = self._parting.prompt_s(view)
        return num_kept_out(prompt_s, pace.after, query.objectives.tpot_s, _num_output(query))

    def _pair(self, query: Query, source: _Source, target: _Target) -> tuple[_Loss, Outlook]:
        handoff_s = self._handoff_overhead.expected_s
        handoff_s += exposed_s(
            source.view, target.view, target.num_missing, source.num_computed, source.computed
        )
        waits_s = handoff_waits(source.first_token.expected_s, target.step_s, target.prompts)
        tpot_s = query.objectives.tpot_s
        slow = slow_ratio(target.pace, tpot_s, target.num_output, handoff_s, waits_s)
        wait_s = sum(waits_s) / (len(waits_s) or 1)
        tolls = (target.toll, source.toll)
        come = Consequences(
            source.first_token, source.late_ratio, target.pace, slow, tolls, handoff_s, wait_s
        )
        return _valued(target, come, source.against + target.against, source)

    def _alone(
        self, query: Query, pace: DecodeForecast, target: _Target, parts: Parts
    ) -> tuple[_Loss, Outlook] | None:
        """The decode worker computes the prompt itself; None: it may not, or cannot tell yet."""
        view = target.view
        if not view.local_prefill or query.needs_prefill:
            return None
        computed = of_prefill(view, self._prompt(query, view.worker), query.now_s)
        if computed is None:
            return None
        first = computed.first_token.later(self._overhead.expected_s)
        told = target.told.beside(computed)
        stalled_s = computed.stall_s(pace.before.expected_s)
        toll = _toll(query, Bystanders(pace, stalled_s, view.promised, told))
        slow = slow_ratio(pace.after, query.objectives.tpot_s, target.num_output)
        come = Consequences(first, _late_ratio(query, first), pace.after, slow, (toll,))
        is_astray = bool(pace.num_rows) and view.worker in parts.decoding
        is_astray |= view.worker in parts.computing
        return _valued(target, come, _ASTRAY * is_astray)

    def _prompt(self, query: Query, worker: WorkerId) -> StepWork:
        """What ``worker`` would have to compute of the prompt; its last token at the least."""
        num_cached = query.num_tokens - self._plain.num_missing(query, worker)
        return StepWork.of_prompt(query.num_tokens, min(num_cached, query.num_tokens - 1))


def _valued(
    target: _Target, come: Consequences, against: float, source: _Source | None = None
) -> tuple[_Loss, Outlook]:
    """What speaks against it beside those that it concerns: ``against``, in objectives, and
    prompts that it would keep out of where they ought to be computed. Without a source the target
    computes the prompt itself.
    """
    missed, seconds = come.missed, come.seconds(target.num_output)
    num_lost = missed.num_all + against + target.kept_out
    rank = target.rank if source is None else target.rank + source.rank
    outlook = Outlook(
        None if source is None else source.view.worker,
        target.view.worker,
        come.first_token.expected_s,
        come.pace.expected_s,
        missed.num_all,
        seconds,
        missed.num_barring + target.kept_out,
        missed.num_own,
        0.0 if source is None else come.gap_s,
    )
    return _Loss(round(num_lost * _PER_OBJECTIVE), seconds, rank), outlook


def _num_output(query: Query) -> int:
    """Tokens of its answer, by expectation."""
    return max(1, min(query.num_output_tokens, query.num_max_tokens - query.num_tokens))


def _late_ratio(query: Query, first_token: Span) -> float:
    within_s = query.objectives.ttft_s
    return 0.0 if within_s is None else first_token.miss_ratio(within_s)


def _toll(query: Query, bystanders: Bystanders) -> Toll:
    return bystanders.toll(query.objectives.tpot_s, _num_output(query))


def _is_too_slow(view: DecodeView, query: Query) -> bool:
    """Whether its steps look so slow that it would probably miss the pace that is wanted."""
    tpot_s, pace = query.objectives.tpot_s, of_decode(view, query.num_tokens)
    return tpot_s is not None and pace is not None and pace.after.miss_ratio(tpot_s) > _MOST_MISSED


def _lacks_prefill(snapshot: Snapshot) -> bool:
    """Whether there shall be prefill workers, and none is there."""
    return snapshot.has_prefill_pool and not snapshot.prefill


def _aimless(query: Query) -> Query:
    """Without what passes from one moment to the next."""
    return replace(query, objectives=NO_OBJECTIVES, now_s=0.0)
