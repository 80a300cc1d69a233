"""Whom a request does not ask for the moment, and how long it waits in all. Pure."""

from diptych.errors import DiptychError
from diptych.timers import Timers
from router.placement.types import Pair, WorkerId

_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 0.5


class Exclusions:
    """Workers and pairs that failed or refused this request; the patience that is left.

    A refusal counts until the request is placed or waits; a failure until it has to
    wait. Then whoever is still there may be asked again, after a pause.
    """

    def __init__(self, timers: Timers) -> None:
        self.failed: set[str] = set()  # incarnations
        self.failed_pairs: set[Pair] = set()
        self.refused: set[str] = set()  # incarnations
        self.refusal: DiptychError | None = None  # the last one
        self.wait_until_s: float | None = None
        self.not_before_s = 0.0
        self._timers = timers
        self._backoff_s = _FIRST_BACKOFF_S

    def refuse(self, worker: WorkerId, error: DiptychError) -> None:
        """``worker`` said no."""
        self.refused.add(worker.incarnation)
        self.refusal = error

    def wait(self, now: float) -> None:
        """No placement is left: begin, or go on, to wait."""
        if self.wait_until_s is None:
            self.wait_until_s = now + self._timers.no_worker_s
        if self.refused or self.failed or self.failed_pairs:
            self.refused.clear()
            self.failed.clear()
            self.failed_pairs.clear()
            self.not_before_s = now + self._backoff_s
            self._backoff_s = min(2 * self._backoff_s, _MAX_BACKOFF_S)

    def placed(self) -> None:
        """Everything asked for was granted: refusals count no more."""
        self.refused.clear()
        self.refusal = None
        self.wait_until_s = None
        self._backoff_s = _FIRST_BACKOFF_S
