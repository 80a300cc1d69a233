"""The seam of placement: whoever chooses workers."""

from typing import Protocol

from router.placement.cache_index import CacheIndex
from router.placement.explanation import Explanation
from router.placement.placement import Forecast, Placement, Unreachable
from router.placement.query import EndedRequest, Query
from router.placement.views import Snapshot, WorkerId


class Policy(Protocol):
    """Chooses workers. Pure: no clock, no I/O; called on the event loop."""

    @property
    def cache(self) -> CacheIndex:
        """What workers have cached, as it goes by; who hears of that tells it there."""
        ...

    def place(self, query: Query, snapshot: Snapshot) -> Placement | None:
        """The best placement there is now; None: wait."""
        ...

    def may_be_local(self, query: Query, snapshot: Snapshot) -> bool:
        """Whether a decode worker might compute the prompt though prefill workers are there."""
        ...

    def may_come(self, query: Query, snapshot: Snapshot) -> bool:
        """Whether there would be a placement if every worker had room, whoever refused before."""
        ...

    @property
    def has_declined(self) -> bool:
        """Whether the newest ``place`` answered None for objectives alone: workers had room."""
        ...

    def foresee(self, query: Query, snapshot: Snapshot, wait_s: float) -> Unreachable | None:
        """Whether its objectives are lost if it may be placed in ``wait_s``, however long it waits.

        None: they are not, or too little is known to say so.
        """
        ...

    def came_true(self, forecast: Forecast, ttft_s: float) -> None:
        """A request that was placed by ``forecast`` had its first token after so long, s."""
        ...

    def went_on(self, forecast: Forecast, gap_s: float) -> None:
        """One whose KV moved had its second token so long after its first, s."""
        ...

    def answered(self, forecast: Forecast, num_tokens: int) -> None:
        """The answer to one that was placed by ``forecast`` is whole: so many tokens since then."""
        ...

    def ended_as(self, seen: EndedRequest) -> None:
        """A request of this router ended, or was refused; not if it failed by what it is itself."""
        ...

    def explain(self, query: Query, snapshot: Snapshot, placement: Placement) -> Explanation:
        """What spoke for ``placement``, which ``place`` has just answered to the same."""
        ...

    def forget(self, worker: WorkerId) -> None:
        """``worker`` is gone, and with it what was cached there."""
        ...
