"""What the pure core of a request calls: clock, ids, placement. All passed in."""

from collections.abc import Callable
from dataclasses import dataclass

from diptych.timers import Timers
from router.placement.placement import Placement, Unreachable
from router.placement.query import Query


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDeps:
    """Pure, or deterministic in tests. Nothing here calls back into the request."""

    clock: Callable[[], float]  # monotonic, s
    place: Callable[[Query], Placement | None]  # answers at once
    has_workers: Callable[[], bool]  # whether some request could be placed now
    queue_ends_in_s: Callable[[], float]  # when those that wait are probably placed, jittered
    new_sequence_id: Callable[[], int]
    new_ticket: Callable[[], bytes]  # 16 random bytes
    timers: Timers
    max_attempts: int
    # Whether workers that are there could take what was to be placed last, had they room.
    may_come: Callable[[], bool] = lambda: True
    draw: Callable[[], float] = lambda: 0.5  # at random, from 0 to 1: spreads pauses
    block_size: Callable[[], int] = lambda: 16  # of the workers' caches, tokens
    allow_recompute: bool = True
    model_digest: Callable[[], str] = lambda: ""  # of what all workers have that are placed on now
    spare_only_s: float = 0.0  # since it first asks: so long it takes no room that others may want
    # Whether the objectives of a request, which comes just now or waits already, are lost; None:
    # nothing is refused for that.
    foresee: Callable[[Query, bool], Unreachable | None] | None = None

    @property
    def sits_out(self) -> bool:
        """Whether its sequences may wait for others on their worker: it is of a batch."""
        return self.spare_only_s > 0.0
