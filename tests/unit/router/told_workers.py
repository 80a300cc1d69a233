"""Workers that only listen, for a request's trace."""

from router.cluster.worker_clock import ClockOffset
from router.placement.views import WorkerId


class ToldWorkers:
    """Implements router.trace.Workers: keeps what it is told."""

    def __init__(self) -> None:
        self.words: list[tuple[WorkerId, int, bool]] = []
        self.offsets: dict[WorkerId, ClockOffset] = {}

    def tell_trace(self, worker: WorkerId, hold: int, *, keep: bool) -> None:
        self.words.append((worker, hold, keep))

    def clock_offset(self, worker: WorkerId) -> ClockOffset | None:
        return self.offsets.get(worker)
