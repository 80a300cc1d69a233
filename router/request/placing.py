"""Asks for workers on behalf of one request, and says when it has waited enough. Pure."""

from diptych.errors import DiptychError
from router.placement.types import Placement, Query, WorkerId
from router.request import worker_errors
from router.request.decode_reservation import DecodeReservation
from router.request.deps import RequestDeps
from router.request.emitted_tokens import EmittedTokens
from router.request.prompt_told import PromptTold
from router.request.retry_state import RetryState


class Placing:
    """The one place that asks placement, for the first workers and for all that follow.

    What it is told is the request's length now and whom to avoid. Owned by the
    request's machine.
    """

    def __init__(
        self, deps: RequestDeps, retry: RetryState, output: EmittedTokens, told: PromptTold
    ) -> None:
        """``retry``, ``output`` and ``told`` are the machine's; they are only read here."""
        self._deps = deps
        self._told = told
        self._retry = retry
        self._output = output

    @property
    def needs_prefill(self) -> bool:
        """Whether only a prefill worker can do what is still to be done."""
        return self._told.missing is not None

    def ask(
        self,
        *,
        on_prefill: WorkerId | None = None,
        on_reservation: DecodeReservation | None = None,
    ) -> Placement | None:
        """The best placement there is now; what is given is held already and stays."""
        query = Query(
            num_tokens=self._output.num_sequence_tokens,
            num_max_tokens=self._output.num_max_tokens,
            failed=frozenset(self._retry.failed),
            failed_pairs=frozenset(self._retry.failed_pairs),
            refused=frozenset(self._retry.refused),
            on_prefill=on_prefill,
            needs_prefill=self.needs_prefill,
        )
        if on_reservation is not None:
            query = query.on(on_reservation.worker, on_reservation.num_cached_tokens)
        return self._deps.place(query)

    def when_offered(self, *, room_made: bool) -> Placement | None:
        """The queue's turn came: ask, unless the pause after a refusal is to be sat out."""
        is_paused = not room_made and self._deps.clock() < self._retry.not_before_s
        return None if is_paused else self.ask()

    def error_if_late(self, now: float) -> DiptychError | None:
        """What a request that has waited too long is told; None: it has not.

        The last refusal says most; else it waited behind others, or there was nobody
        to wait for.
        """
        if self._retry.wait_until_s is None or now < self._retry.wait_until_s:
            return None
        if self._retry.refusal is not None:
            return self._retry.refusal
        return (
            worker_errors.queue_timeout() if self._deps.has_workers() else worker_errors.no_worker()
        )
