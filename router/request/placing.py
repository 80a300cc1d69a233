"""Asks for workers on behalf of one request, and says when it has waited enough. Pure."""

from diptych.errors import DiptychError, WorkerLostError
from router.placement.placement import Placement
from router.placement.query import Query
from router.placement.views import WorkerId
from router.request import worker_errors
from router.request.decode_reservation import DecodeReservation
from router.request.deps import RequestDeps
from router.request.emitted_tokens import EmittedTokens
from router.request.prompt_told import PromptTold
from router.request.retry_state import RetryState

ASK_AGAIN_S = 0.5  # other routers' requests end too, of which nobody is told at once


class Placing:
    """The one place that asks placement, for the first workers and for all that follow.

    What it is told is the request's length now and whom to avoid. Owned by the
    request's machine.
    """

    def __init__(
        self,
        deps: RequestDeps,
        retry: RetryState,
        output: EmittedTokens,
        told: PromptTold,
        first_token_due_s: float | None = None,
        model_digest: str = "",
    ) -> None:
        """``retry``, ``output`` and ``told`` are the machine's; they are only read here.

        ``first_token_due_s`` is when the first token is wanted, a moment of the clock;
        ``model_digest`` of the weights that the output has to be of; empty: of any. Whoever asks
        named it: it is demanded of workers and never told as theirs.
        """
        self.model_digest = ""
        """Of the weights that it was placed on, as workers tell it; empty: unknown."""
        self._demanded_digest = model_digest
        self._deps = deps
        self._told = told
        self._retry = retry
        self._output = output
        self._was_placed = False
        self._is_kept = False  # until workers grant it all it needs, however long that takes
        self._spare_only_until_s = deps.clock() + deps.spare_only_s
        self.judge_at_s = None if deps.foresee is None else first_token_due_s
        """When one that still waits is to be judged, once; None: never."""
        self.ask_again_at_s: float | None = None
        """When one that waits for better objectives asks again, if nothing happens before."""

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
        """The best placement there is now; what is given is held already and stays.

        With nothing held, only where ``error_if_changed`` has no error; of weights that are
        demanded there is none before it is known what is served.
        """
        holds_none = on_prefill is None and on_reservation is None
        assert not holds_none or self.error_if_changed() is None, "other weights are served"
        served = self._deps.model_digest()
        if holds_none and self._demanded_digest and not served:
            return None
        query = self._query(on_prefill)
        if on_reservation is not None:
            query = query.on(on_reservation.worker, on_reservation.num_cached_tokens)
        placement = self._deps.place(query)
        if placement is not None:
            self._was_placed = True
        if placement is not None and holds_none:
            self.model_digest = served or self._own_digest
        return placement

    def error_if_changed(self) -> DiptychError | None:
        """What one is told that began with another model than is served; None: it did not.

        What is held goes on, on its own worker, which has the weights that it had. Workers that
        do not say what they have are not those that were demanded.
        """
        began, served = self._own_digest, self._deps.model_digest()
        if not began or began == served:
            return None
        if not served and not (self._demanded_digest and self._deps.has_workers()):
            return None
        return worker_errors.model_changed(began, served)

    def keep_model(self) -> str:
        """Other choices begin, of the weights that this one is of; their digest.

        Whoever has the first token, all are of these from now on.
        """
        self._demanded_digest = self._own_digest or self.model_digest
        return self._demanded_digest

    @property
    def _own_digest(self) -> str:
        """Of the weights without which it cannot go on; empty: it may be of any."""
        has_begun = bool(self._output.token_ids) or self._told.has_begun
        return self._demanded_digest or (self.model_digest if has_begun else "")

    def _query(self, on_prefill: WorkerId | None = None) -> Query:
        return Query(
            num_tokens=self._output.num_sequence_tokens,
            num_max_tokens=self._output.num_max_tokens,
            failed=frozenset(self._retry.failed),
            failed_pairs=frozenset(self._retry.failed_pairs),
            refused=frozenset(self._retry.refused),
            on_prefill=on_prefill,
            needs_prefill=self.needs_prefill,
            takes_spare_only=self._takes_spare_only(),
            may_refuse=self._may_refuse,
        )

    def when_offered(self, *, room_made: bool) -> Placement | DiptychError | None:
        """The queue's turn came: ask, unless the pause after a refusal is to be sat out.

        An error: it need not wait any longer.
        """
        if (changed := self.error_if_changed()) is not None:
            return changed
        if not room_made and self._deps.clock() < self._retry.not_before_s:
            return None
        found = self.ask() or self._error_if_unreachable(is_new=False)
        if found is None and self._may_refuse:
            self.ask_again_at_s = self._deps.clock() + ASK_AGAIN_S
        elif found is None and self._takes_spare_only():
            self.ask_again_at_s = self._spare_only_until_s
        return found

    def _takes_spare_only(self) -> bool:
        """Whether it still leaves room to others; nobody does who was placed once."""
        if self._was_placed or not self._deps.spare_only_s:
            return False
        return self._deps.clock() < self._spare_only_until_s

    def error_before_asking(self, *, is_new: bool) -> DiptychError | None:
        """What one is told who need not ask at all; None: it may ask, or wait for its turn.

        ``is_new``: it comes just now.
        """
        return self.error_if_changed() or self._error_if_unreachable(is_new=is_new)

    def _error_if_unreachable(self, *, is_new: bool) -> DiptychError | None:
        """What one is told whose objectives are lost, whenever it starts; None: they are not.

        ``is_new``: it comes just now. Whoever was placed once is never told so.
        """
        if self._deps.foresee is None or not self._may_refuse:
            return None
        found = self._deps.foresee(self._query(), is_new)
        return None if found is None else worker_errors.unreachable(found)

    def keep(self) -> None:
        """Another choice of the request was placed: this one waits for as long as it takes, most
        likely for its sisters to end.
        """
        self._was_placed = self._is_kept = True

    def settled(self) -> None:
        """Workers granted all it asked for: from now on it waits as any other. Idempotent."""
        self._is_kept = False

    @property
    def _may_refuse(self) -> bool:
        """Nobody who was placed once, or goes on where another call broke off."""
        is_new = not (self._was_placed or self._output.token_ids)
        return self._deps.foresee is not None and is_new

    def error_while_waiting(self, now: float) -> DiptychError | None:
        """What a request is told that need not wait any longer, or has waited too long; None: it
        goes on waiting.

        Of one that has waited too long the last refusal says most, unless it was that of a worker
        that went, while others could take it; else it waited behind others, or nobody who is there
        could take it.
        """
        if (changed := self.error_if_changed()) is not None:
            return changed
        if self.ask_again_at_s is not None and now >= self.ask_again_at_s:
            self.ask_again_at_s = None
        if self.judge_at_s is not None and now >= self.judge_at_s:
            self.judge_at_s = None
            error = self._error_if_unreachable(is_new=False)
            if error is not None:
                return error
        if self._retry.wait_until_s is None or now < self._retry.wait_until_s:
            return None
        refusal = self._retry.refusal
        is_busy = refusal is None or worker_errors.is_refusal(refusal)
        has_workers = self._deps.has_workers()
        may_come = has_workers and self._deps.may_come()
        if self._is_kept and is_busy and may_come:
            self._retry.wait_on(now)
            return None
        if refusal is not None and not (may_come and worker_errors.is_leaving(refusal)):
            return refusal
        if may_come:
            return worker_errors.queue_timeout(self._deps.queue_ends_in_s())
        lost = self._retry.because
        if isinstance(lost, WorkerLostError):
            return lost
        if not has_workers:
            return worker_errors.no_worker()
        return worker_errors.none_fits(needs_prefill=self.needs_prefill)
