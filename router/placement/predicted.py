"""Placement by what is predicted to be lost: objectives first, then everybody's seconds. Pure."""

from collections.abc import Callable
from copy import copy
from functools import partial
from heapq import nsmallest
from operator import itemgetter
from typing import NamedTuple

from router.placement.candidates import Overheads, prompt_work, weigh
from router.placement.explanation import Explanation
from router.placement.forecast import alone_s, of_decode, of_prefill
from router.placement.glance import busy_workers, has_all_room, idle, prompt_token_s
from router.placement.least_loaded import LeastLoaded
from router.placement.overhead import Overhead
from router.placement.parting import Parting
from router.placement.placement import (
    DecodeOnly,
    Forecast,
    Outlook,
    Paired,
    Placement,
    Unreachable,
    Why,
)
from router.placement.probes import Probes, most_slowed, perhaps_in_time
from router.placement.query import NO_OBJECTIVES, EndedRequest, Query
from router.placement.shortlist import NUM_HOLDERS, NUM_WEIGHED
from router.placement.unreachable import too_late, too_slow
from router.placement.views import DecodeView, PrefillView, Snapshot, WorkerId
from router.placement.weighed import Weighed

_NUM_TOLD = 4  # candidates that a forecast names, the best
# Objectives because of one request that may be refused: its own and others'; and others' alone,
# of which less where those wait for its prompt, and are the fewer the longer it waits itself.
_MOST_MISSED = 0.5
_MOST_OF_OTHERS = 0.3
_MOST_BESIDE_PROMPT = 0.1


class _Held(NamedTuple):
    """One that was not placed: what it asked for but objectives, and when it could begin."""

    query: Query
    snapshot: Snapshot
    soonest_s: float | None  # its first token


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

    def __init__(self, plain: LeastLoaded, chance: Callable[[], float]) -> None:
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
        """See :class:`router.placement.policy.Policy`."""
        self._plain.forget(worker)
        self._probes.forget(worker)

    def place(self, query: Query, snapshot: Snapshot) -> Placement | None:
        """See :class:`router.placement.policy.Policy`."""
        self.has_declined = False
        self._age(query.now_s)
        if self._is_plain(query, snapshot):
            return self._plain.place(query, snapshot)
        weighed = self._weigh(query, snapshot, is_real=not query.takes_spare_only)
        if not weighed:
            return self._plain.place(query, snapshot)
        best = weighed.best(_NUM_TOLD)
        is_probe = False
        if query.may_refuse and _is_barred(best[0][1]):
            overhead_s = self._overhead.expected_s
            busy = busy_workers(snapshot)
            calm = weighed.where(lambda prefill, decode: busy.isdisjoint((prefill, decode)))
            tried = perhaps_in_time(calm, query, snapshot, overhead_s)
            is_probe = not tried
            if is_probe:
                idle = {view.worker for view in snapshot.decode if not view.num_sequences}
                due = idle.intersection(self._probes.due)
                tried = weighed.where(lambda _, decode: decode in due)
                if not tried and not self._probes.is_due:
                    self._held = _Held(_aimless(query), snapshot, weighed.soonest_s)
                    self.has_declined = True
                    return None
                self._probes.probed()
            best = nsmallest(_NUM_TOLD, tried, key=itemgetter(0)) or best
        chosen = best[0][1]
        self._probes.placed(chosen.prefill, chosen.decode)
        num_missing = self._plain.num_missing(query, chosen.prefill or chosen.decode)
        num_workers = max(len(snapshot.prefill), len(snapshot.decode))
        counted = self._parting.learn(query, num_missing, num_workers)
        told = tuple(candidate for _, candidate in best)
        forecast = Forecast(chosen, told, *self._overheads, is_probe, counted)
        if chosen.prefill is not None:
            return Paired(chosen.prefill, chosen.decode, forecast)
        why = Why.NO_PREFILL if _lacks_prefill(snapshot) else Why.CHOICE
        return DecodeOnly(chosen.decode, why, query.num_tokens - num_missing, forecast)

    def may_be_local(self, query: Query, snapshot: Snapshot) -> bool:
        """See :class:`router.placement.policy.Policy`. It is weighed."""
        return True

    def may_come(self, query: Query, snapshot: Snapshot) -> bool:
        """See :class:`router.placement.policy.Policy`. Objectives are no matter."""
        return self._plain.may_come(query, snapshot)

    def foresee(self, query: Query, snapshot: Snapshot, wait_s: float) -> Unreachable | None:
        """See :class:`router.placement.policy.Policy`.

        A first token that would be late now is later the later it begins. A decode worker that
        is too slow for one more may be fast enough once others have ended, so it is waited for
        as long as the first token can be in time, unless it would be too slow for one alone.

        Where many were refused one is tried: see :class:`router.placement.probes.Probes`.
        """
        self._age(query.now_s)
        found = None if self._is_plain(query, snapshot) else self._lost(query, snapshot, wait_s)
        if found is not None:
            busy = {view.worker for view in snapshot.decode if view.num_sequences}
            idle = (view for view in snapshot.decode if view.worker not in busy)
            self._probes.refused({v.worker for v in idle if _is_too_slow(v, query)}, busy)
        return found

    def is_lost(self, query: Query, snapshot: Snapshot) -> bool:
        """Whether ``foresee`` would say so; here nobody is refused for it."""
        self._age(query.now_s)
        is_plain = self._is_plain(query, snapshot)
        return not is_plain and self._lost(query, snapshot, 0.0) is not None

    def _age(self, now_s: float) -> None:
        self._overhead.age(now_s)
        self._handoff_overhead.age(now_s)

    def _is_plain(self, query: Query, snapshot: Snapshot) -> bool:
        """Whether it is a placement of which nothing is foretold."""
        bound = not query.is_fresh or query.prefill_alone or query.beside is not None
        return bound or (_lacks_prefill(snapshot) and not self._plain.allow_local)

    def _lost(self, query: Query, snapshot: Snapshot, wait_s: float) -> Unreachable | None:
        within_s, tpot_s, whole_s, *_ = query.objectives
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
            soonest_s = held.soonest_s
            is_early = within_s is None or soonest_s is None or wait_s + soonest_s <= within_s
            if is_early or has_all_room(snapshot):
                return soonest_s
        weighed = self._weigh(query._replace(as_if_room=True), snapshot, is_real=False)
        return None if weighed is None else weighed.soonest_s

    def _alone_s(self, query: Query, snapshot: Snapshot) -> float:
        """Its prompt's steps on workers that have nothing else to do, the fastest that is known.

        What else first tokens take passes.
        """
        views: list[PrefillView | DecodeView] = [*snapshot.prefill]
        if not query.needs_prefill:
            views += [view for view in snapshot.decode if view.local_prefill]
        fast = nsmallest(NUM_WEIGHED, views, key=prompt_token_s)
        holders, missing = self._plain.holders(query), partial(self._plain.num_missing, query)
        having = [view for view in views if view.worker.incarnation in holders and view not in fast]
        computed = [
            of_prefill(idle(view), prompt_work(query, missing(view.worker)), query.now_s)
            for view in [*fast, *having[:NUM_HOLDERS]]
        ]
        return min((each.first_token.expected_s for each in computed if each), default=0.0)

    def came_true(self, forecast: Forecast, ttft_s: float) -> None:
        """See :class:`router.placement.policy.Policy`."""
        self._probes.came()
        foretold_s = forecast.chosen.ttft_s - forecast.overhead_s
        self._overhead.came_true(ttft_s, foretold_s, is_probe=forecast.is_probe)

    def went_on(self, forecast: Forecast, gap_s: float) -> None:
        """See :class:`router.placement.policy.Policy`."""
        foretold_s = forecast.chosen.gap_s - forecast.handoff_overhead_s
        self._handoff_overhead.came_true(gap_s, foretold_s)

    def answered(self, forecast: Forecast, num_tokens: int) -> None:
        """See :class:`router.placement.policy.Policy`."""
        if forecast.counted is not None:
            self._parting.answered(forecast.counted, num_tokens)

    def ended_as(self, seen: EndedRequest) -> None:
        """See :class:`router.placement.policy.Policy`. First tokens have taught it."""

    def explain(self, query: Query, snapshot: Snapshot, placement: Placement) -> Explanation:
        """See :class:`router.placement.policy.Policy`. What was foretold is in the placement."""
        return self._plain.explain(query, snapshot, placement)

    def _weigh(self, query: Query, snapshot: Snapshot, *, is_real: bool = True) -> Weighed | None:
        """Every candidate with its loss; workers part by a real snapshot alone."""
        parting = self._parting if is_real else copy(self._parting)
        return weigh(query, snapshot, self._plain, parting, self._overheads)

    @property
    def _overheads(self) -> Overheads:
        return Overheads(self._overhead.expected_s, self._handoff_overhead.expected_s)


def _is_too_slow(view: DecodeView, query: Query) -> bool:
    """Whether its steps look so slow that it would probably miss the pace that is wanted."""
    tpot_s, pace = query.objectives.tpot_s, of_decode(view, query.num_tokens)
    return tpot_s is not None and pace is not None and pace.after.miss_ratio(tpot_s) > _MOST_MISSED


def _is_barred(outlook: Outlook) -> bool:
    """Whether more is lost by it than may be."""
    num_others = outlook.num_barring - outlook.num_own_missed
    most = _MOST_BESIDE_PROMPT if outlook.prefill is None else _MOST_OF_OTHERS
    return outlook.num_barring > _MOST_MISSED or num_others > most


def _lacks_prefill(snapshot: Snapshot) -> bool:
    """Whether there shall be prefill workers, and none is of use."""
    return snapshot.has_prefill_pool and not snapshot.has_prefill


def _aimless(query: Query) -> Query:
    """Without what passes from one moment to the next."""
    return query._replace(objectives=NO_OBJECTIVES, now_s=0.0)
