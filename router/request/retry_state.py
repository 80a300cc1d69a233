"""Whom a request does not ask for the moment, what it has spent, how long it still waits. Pure."""

from collections.abc import Callable

from diptych.errors import DiptychError
from diptych.timers import Timers
from router.placement.views import Pair, WorkerId

_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 0.5


class RetryState:
    """Workers and pairs that failed or refused this request; attempts and patience left.

    A refusal counts until the request is placed or waits; a failure until it has to
    wait. Then whoever is still there may be asked again, after a pause: by chance a longer or
    a shorter one, that requests which refuse each other's halves do not meet again. Owned by
    the request's machine.
    """

    def __init__(
        self, timers: Timers, max_attempts: int, draw: Callable[[], float] = lambda: 0.5
    ) -> None:
        """``draw`` is from 0 to 1: a pause is by up to half longer or shorter."""
        self.num_attempts = 1
        self.refusal: DiptychError | None = None  # the last one
        self.wait_until_s: float | None = None  # None: it does not wait
        self.not_before_s = 0.0  # the end of the pause
        self.had_bad_logits = False
        self.because: DiptychError | None = None  # why a new attempt is due
        self._timers = timers
        self._draw = draw
        self._max_attempts = max_attempts
        self.failed: set[str] = set()  # incarnations
        self.failed_pairs: set[Pair] = set()
        self.refused: set[str] = set()  # incarnations
        self._backoff_s = _FIRST_BACKOFF_S

    def spend_attempt(self) -> bool:
        """Count a fail-over; False if that would be one too many."""
        if self.num_attempts >= self._max_attempts:
            return False
        self.num_attempts += 1
        return True

    def refuse(self, worker: WorkerId, error: DiptychError) -> None:
        """``worker`` said no."""
        self.refused.add(worker.incarnation)
        self.refusal = error

    def fail(self, worker: WorkerId) -> None:
        """``worker`` broke something."""
        self.failed.add(worker.incarnation)

    def forgive(self, worker: WorkerId) -> None:
        """``worker`` may be asked after all."""
        self.failed.discard(worker.incarnation)

    def fail_pair(self, prefill: WorkerId, decode: WorkerId) -> None:
        """The hand-off between these two does not work."""
        self.failed_pairs.add(Pair(prefill.incarnation, decode.incarnation))

    def wait(self, now: float) -> None:
        """No placement is left: begin, or go on, to wait."""
        if self.wait_until_s is None:
            self.wait_until_s = now + self._timers.no_worker_s
        if self.refused or self.failed or self.failed_pairs:
            self.refused.clear()
            self.failed.clear()
            self.failed_pairs.clear()
            self.not_before_s = now + self._backoff_s * (0.5 + self._draw())
            self._backoff_s = min(2 * self._backoff_s, _MAX_BACKOFF_S)

    def wait_on(self, now: float) -> None:
        """It has waited in vain, and goes on."""
        self.wait_until_s = now + self._timers.no_worker_s

    def due_s(self, now: float) -> float | None:
        """When something changes for one that waits: the pause or its patience ends."""
        if self.not_before_s <= now or self.wait_until_s is None:
            return self.wait_until_s
        return min(self.not_before_s, self.wait_until_s)

    def placed(self) -> None:
        """Everything asked for was granted: refusals count no more."""
        self.refused.clear()
        self.refusal = None
        self.wait_until_s = None
        self._backoff_s = _FIRST_BACKOFF_S
