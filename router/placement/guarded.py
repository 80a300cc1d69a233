"""A policy that foretells, and what it falls back to where that turns out badly. Pure."""

import logging
from dataclasses import replace

from router.placement.explanation import Explanation
from router.placement.guard import Guard, Rates, Regime
from router.placement.policy import LeastLoaded
from router.placement.predicted import Predicted
from router.placement.types import (
    DecodeOnly,
    Forecast,
    Paired,
    Placement,
    Promise,
    Query,
    Seen,
    Snapshot,
    Unreachable,
    WorkerId,
)

logger = logging.getLogger(__name__)


class Guarded:
    """Places as ``predicted`` does, or by ``plain`` while the guard takes a fixed regime.

    In a fixed one nothing is refused or held by what is foretold, as that is in doubt.
    """

    def __init__(self, predicted: Predicted, plain: LeastLoaded) -> None:
        """``plain`` is the one that ``predicted`` was made with."""
        self.cache = plain.cache
        self.guard = Guard()
        self._predicted = predicted
        self._plain = plain

    def place(self, query: Query, snapshot: Snapshot) -> Placement | None:
        """See :class:`router.placement.types.Policy`."""
        if self.guard.is_due and self.guard.look(Rates.of(snapshot)):
            logger.warning("placement turns", extra={"regime": self.guard.regime.value})
        if self.guard.regime is Regime.FREE:
            placement = self._predicted.place(query, snapshot)
            if isinstance(placement, Paired | DecodeOnly) and placement.forecast is not None:
                self.guard.foretold(placement.forecast.chosen.num_missed)
            return placement
        found = None
        if self.guard.regime is Regime.TOGETHER:
            found = self._plain.together(query, snapshot)
        return found or self._plain.place(replace(query, may_refuse=False), snapshot)

    @property
    def has_declined(self) -> bool:
        """See :class:`router.placement.types.Policy`."""
        return self.guard.regime is Regime.FREE and self._predicted.has_declined

    def foresee(self, query: Query, snapshot: Snapshot, wait_s: float) -> Unreachable | None:
        """See :class:`router.placement.types.Policy`."""
        if self.guard.regime is not Regime.FREE:
            return None
        return self._predicted.foresee(query, snapshot, wait_s)

    def ended_as(self, seen: Seen) -> None:
        """See :class:`router.placement.types.Policy`."""
        self.guard.ended(seen)

    def came_true(self, forecast: Forecast, ttft_s: float) -> None:
        """See :class:`router.placement.types.Policy`."""
        self._predicted.came_true(forecast, ttft_s)

    def explain(self, query: Query, snapshot: Snapshot, placement: Placement) -> Explanation:
        """See :class:`router.placement.types.Policy`."""
        return self._predicted.explain(query, snapshot, placement)

    def began(self, worker: WorkerId, promise: Promise) -> None:
        """See :class:`router.placement.types.Policy`."""
        self._predicted.began(worker, promise)

    def ended(self, worker: WorkerId, promise: Promise) -> None:
        """See :class:`router.placement.types.Policy`."""
        self._predicted.ended(worker, promise)

    def forget(self, worker: WorkerId) -> None:
        """See :class:`router.placement.types.Policy`."""
        self._predicted.forget(worker)
