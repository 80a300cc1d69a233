"""A policy that foretells, and what it falls back to where that turns out badly. Pure."""

import logging
from collections.abc import Callable
from dataclasses import replace

from router.placement.explanation import Explanation
from router.placement.guard import Guard, Rates, Regime, both_alone
from router.placement.least_loaded import LeastLoaded
from router.placement.measured import first_token_s, is_in_time
from router.placement.placement import DecodeOnly, Forecast, Paired, Placement, Unreachable
from router.placement.predicted import Predicted
from router.placement.query import EndedRequest, Query
from router.placement.unreachable import too_late
from router.placement.views import Snapshot, WorkerId

logger = logging.getLogger(__name__)


class Guarded:
    """Places as :class:`Predicted` does, or by ``plain`` while the guard takes a fixed regime.

    In a fixed one nothing is refused or held by what is foretold, as that is in doubt, but by what
    workers measured: more than they can do keeps nobody's objectives, however it is placed.
    """

    def __init__(self, plain: LeastLoaded, chance: Callable[[], float]) -> None:
        """``chance``: see :class:`router.placement.predicted.Predicted`."""
        self.cache = plain.cache
        self.guard = Guard()
        self._predicted = Predicted(plain, chance)
        self._plain = plain
        self._chance = chance
        self._has_declined = False  # in a fixed regime

    def place(self, query: Query, snapshot: Snapshot) -> Placement | None:
        """See :class:`router.placement.policy.Policy`."""
        sees_all = not query.takes_spare_only  # see router.placement.spare
        if sees_all and self.guard.is_due and self.guard.look(Rates.of(snapshot)):
            logger.warning("placement turns", extra={"regime": self.guard.regime.value})
        if self.guard.regime is Regime.FREE:
            placement = self._predicted.place(query, snapshot)
            if isinstance(placement, Paired | DecodeOnly) and placement.forecast is not None:
                chosen = placement.forecast.chosen
                self.guard.foretold(chosen.num_missed, chosen.num_own_missed, query.now_s)
            return placement
        found = self._fixed(query, snapshot)
        self._has_declined = (
            found is not None
            and query.may_refuse
            and not is_in_time(found, query, snapshot, self._plain.num_missing)
        )
        return None if self._has_declined else found

    def may_be_local(self, query: Query, snapshot: Snapshot) -> bool:
        """See :class:`router.placement.policy.Policy`."""
        return self._predicted.may_be_local(query, snapshot)

    def may_come(self, query: Query, snapshot: Snapshot) -> bool:
        """See :class:`router.placement.policy.Policy`."""
        return self._plain.may_come(query, snapshot)

    @property
    def has_declined(self) -> bool:
        """See :class:`router.placement.policy.Policy`."""
        if self.guard.regime is not Regime.FREE:
            return self._has_declined
        return self._predicted.has_declined

    def foresee(self, query: Query, snapshot: Snapshot, wait_s: float) -> Unreachable | None:
        """See :class:`router.placement.policy.Policy`."""
        if self.guard.regime is Regime.FREE:
            return self._predicted.foresee(query, snapshot, wait_s)
        within_s = query.objectives.ttft_s
        found = self._fixed(query._replace(as_if_room=True), snapshot)
        if within_s is None or found is None:
            return None
        soonest_s = first_token_s(found, query, snapshot, self._plain.num_missing)
        if soonest_s is None or wait_s + soonest_s <= within_s:
            return None
        return too_late(wait_s + soonest_s, query.objectives, self._chance)

    def _is_lost(self, query: Query, snapshot: Snapshot) -> bool:
        """Whether its objectives are, as things are now; it is not told so by that."""
        if self.guard.regime is Regime.FREE:
            return self._predicted.is_lost(query, snapshot)
        return self.foresee(query, snapshot, 0.0) is not None

    def _fixed(self, query: Query, snapshot: Snapshot) -> Placement | None:
        """By load, where the regime has it."""
        found: Placement | None = None
        if self.guard.regime is Regime.APART and query.is_fresh:
            apart = _apart(snapshot)
            snapshot = apart if self._plain.may_come(query, apart) else snapshot
        if self.guard.regime is Regime.TOGETHER:
            found = self._plain.together(query, snapshot)
        return found or self._plain.place(query._replace(may_refuse=False), snapshot)

    def ended_as(self, seen: EndedRequest) -> None:
        """See :class:`router.placement.policy.Policy`."""
        self.guard.ended(seen)

    def came_true(self, forecast: Forecast, ttft_s: float) -> None:
        """See :class:`router.placement.policy.Policy`."""
        self._predicted.came_true(forecast, ttft_s)

    def went_on(self, forecast: Forecast, gap_s: float) -> None:
        """See :class:`router.placement.policy.Policy`."""
        self._predicted.went_on(forecast, gap_s)

    def answered(self, forecast: Forecast, num_tokens: int) -> None:
        """See :class:`router.placement.policy.Policy`."""
        self._predicted.answered(forecast, num_tokens)

    def explain(self, query: Query, snapshot: Snapshot, placement: Placement) -> Explanation:
        """See :class:`router.placement.policy.Policy`."""
        return self._predicted.explain(query, snapshot, placement)

    def forget(self, worker: WorkerId) -> None:
        """See :class:`router.placement.policy.Policy`."""
        self._predicted.forget(worker)


def _apart(snapshot: Snapshot) -> Snapshot:
    """Half of the workers for prompts, where each has both roles; else as it is."""
    both = both_alone(snapshot)
    computing = both[: len(both) // 2]
    if not computing:
        return snapshot
    return replace(
        snapshot,
        prefill=tuple(view for view in snapshot.prefill if view.worker in computing),
        decode=tuple(view for view in snapshot.decode if view.worker not in computing),
    )
