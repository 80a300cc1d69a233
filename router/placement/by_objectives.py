"""Foretells for requests that say what they want; places all others by load. Pure."""

from router.placement.guarded import Guarded
from router.placement.placement import Placement, Unreachable
from router.placement.query import NO_OBJECTIVES, EndedRequest, Query
from router.placement.views import Snapshot


class ByObjectives(Guarded):
    """So that objectives count wherever they are told, and change nothing where none are.

    What requests without any do counts as well: they run beside the others. A deadline is none:
    who cannot have a first token before it is refused, and all others are placed as without it.
    """

    _is_foretold = False  # the newest placement was asked of what is foretold

    def place(self, query: Query, snapshot: Snapshot) -> Placement | None:
        """See :class:`router.placement.policy.Policy`."""
        self._is_foretold = query.objectives.are_asked_for or self._is_late(query, snapshot)
        if not self._is_foretold:
            return self._plain.place(query, snapshot)
        return super().place(query, snapshot)

    def may_be_local(self, query: Query, snapshot: Snapshot) -> bool:
        """See :class:`router.placement.policy.Policy`."""
        if not query.objectives.are_asked_for:
            return self._plain.may_be_local(query, snapshot)
        return super().may_be_local(query, snapshot)

    @property
    def has_declined(self) -> bool:
        """See :class:`router.placement.policy.Policy`."""
        return self._is_foretold and super().has_declined

    def foresee(self, query: Query, snapshot: Snapshot, wait_s: float) -> Unreachable | None:
        """See :class:`router.placement.policy.Policy`. A deadline counts as well."""
        if query.objectives[:2] == NO_OBJECTIVES[:2]:
            return None
        return super().foresee(query, snapshot, wait_s)

    def ended_as(self, seen: EndedRequest) -> None:
        """See :class:`router.placement.policy.Policy`. Of the others nothing was foretold."""
        if seen.objectives.are_asked_for:
            super().ended_as(seen)

    def _is_late(self, query: Query, snapshot: Snapshot) -> bool:
        """Whether its deadline is lost as things are, of one that may be told so."""
        has_deadline = query.objectives.ttft_s is not None
        return has_deadline and query.may_refuse and self._is_lost(query, snapshot)
