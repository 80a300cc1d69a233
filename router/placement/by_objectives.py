"""Foretells for requests that say what they want; places all others by load. Pure."""

from router.placement.explanation import Explanation
from router.placement.guarded import Guarded
from router.placement.policy import LeastLoaded
from router.placement.types import (
    NO_OBJECTIVES,
    Forecast,
    Objectives,
    Placement,
    Promise,
    Query,
    Seen,
    Snapshot,
    Unreachable,
    WorkerId,
)


class ByObjectives:
    """So that objectives count wherever they are told, and change nothing where none are.

    What requests without any do is known to ``guarded`` as well: they run beside the others.
    """

    def __init__(self, guarded: Guarded, plain: LeastLoaded) -> None:
        """``plain`` is the one that ``guarded`` was made with."""
        self.cache = plain.cache
        self.guard = guarded.guard
        self._guarded = guarded
        self._plain = plain
        self.has_declined = False  # see Policy

    def place(self, query: Query, snapshot: Snapshot) -> Placement | None:
        """See :class:`router.placement.types.Policy`."""
        if not _has_any(query.objectives):
            self.has_declined = False
            return self._plain.place(query, snapshot)
        placement = self._guarded.place(query, snapshot)
        self.has_declined = self._guarded.has_declined
        return placement

    def foresee(self, query: Query, snapshot: Snapshot, wait_s: float) -> Unreachable | None:
        """See :class:`router.placement.types.Policy`."""
        if not _has_any(query.objectives):
            return None
        return self._guarded.foresee(query, snapshot, wait_s)

    def ended_as(self, seen: Seen) -> None:
        """See :class:`router.placement.types.Policy`. Of the others nothing was foretold."""
        if _has_any(seen.objectives):
            self._guarded.ended_as(seen)

    def came_true(self, forecast: Forecast, ttft_s: float) -> None:
        """See :class:`router.placement.types.Policy`."""
        self._guarded.came_true(forecast, ttft_s)

    def explain(self, query: Query, snapshot: Snapshot, placement: Placement) -> Explanation:
        """See :class:`router.placement.types.Policy`."""
        return self._guarded.explain(query, snapshot, placement)

    def began(self, worker: WorkerId, promise: Promise) -> None:
        """See :class:`router.placement.types.Policy`."""
        self._guarded.began(worker, promise)

    def ended(self, worker: WorkerId, promise: Promise) -> None:
        """See :class:`router.placement.types.Policy`."""
        self._guarded.ended(worker, promise)

    def forget(self, worker: WorkerId) -> None:
        """See :class:`router.placement.types.Policy`."""
        self._guarded.forget(worker)


def _has_any(objectives: Objectives) -> bool:
    return objectives[:2] != NO_OBJECTIVES[:2]
