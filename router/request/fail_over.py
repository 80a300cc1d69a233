"""Meets failures: tries the ways out of each in order, with what is held and placement's help.

Pure. What to try is decided by :func:`router.request.recovery.decide`.
"""

import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple, assert_never

from diptych.errors import DiptychError
from router.placement.placement import DecodeOnly, Paired, Placement, PrefillOnly, Why
from router.placement.views import WorkerId
from router.request import actions, events, worker_errors
from router.request.actions import Action, Retry
from router.request.attempt import Attempt
from router.request.decode_reservation import DecodeReservation
from router.request.deps import RequestDeps
from router.request.placing import Placing
from router.request.recovery import (
    Blame,
    FailureKind,
    Held,
    Recovery,
    Rung,
    decide,
    lease_failure,
    pull_failure,
    reservation_failure,
)
from router.request.retry_state import RetryState


class Outcome(enum.Enum):
    """How a failure was met."""

    GOES_ON = enum.auto()  # a lease or a reservation was asked for, or the same bound again
    RUNS = enum.auto()  # the reservation was started
    START_OVER = enum.auto()  # free lease and reservation, place anew


class GiveUp(NamedTuple):
    """Nothing helps: the request ends with this."""

    error: DiptychError


Met = Outcome | GiveUp


class FailOver:
    """Turns failures into recoveries and carries them out on the machine's attempt.

    Neither queues nor ends the request: that is left to the machine, its owner, by the
    outcome that each method returns (None: nothing had failed).
    """

    def __init__(
        self,
        deps: RequestDeps,
        attempt: Attempt,
        retry: RetryState,
        placing: Placing,
        emitted: Sequence[int],
        do: Callable[[Action], None],
    ) -> None:
        """``emitted`` grows with the output; ``do`` gets what has to be sent, in order."""
        self._attempt = attempt
        self._retry = retry
        self._placing = placing
        self._do = do
        self._emitted = emitted
        self._allow_recompute = deps.allow_recompute

    # What fails

    def lease_ended(self, event: events.LeaseEnded) -> Met | None:
        """Its worker refused it, failed or is gone."""
        lease = self._attempt.lease_of(event.sequence_id)
        if lease is None:
            return None
        error = worker_errors.ended(event.error)
        kind = lease_failure(error, is_opening=lease.is_opening)
        if kind in (FailureKind.LEASE_LOST, FailureKind.LEASE_EXPIRED):
            error = worker_errors.broken_off(
                "prefill", lease.worker, error, had_begun=not lease.is_opening
            )
        self._attempt.drop_lease()
        return self._recover(kind, lease.worker, error)

    def lease_broken(self, why: str) -> Met:
        """The worker of the held lease lives and does wrong."""
        lease = self._attempt.lease
        assert lease is not None, "no lease to break"
        self._attempt.close_lease()
        error = worker_errors.lost("prefill", lease.worker, why)
        return self._recover(FailureKind.LEASE_LOST, lease.worker, error)

    def reservation_over(self, event: events.Ended | events.ReservationLost) -> Met | None:
        """Its worker refused it, or it ended before the sequence had finished."""
        held = self._attempt.reservation_of(event.sequence_id)
        if held is None:
            return None
        if isinstance(event, events.Ended):
            error = worker_errors.ended(event.error)
            kind = reservation_failure(error, is_reserving=held.is_reserving)
            if kind is FailureKind.RESERVATION_LOST:
                error = worker_errors.broken_off(
                    "decode", held.worker, error, had_begun=not held.is_reserving
                )
        else:
            kind = FailureKind.RESERVATION_LOST
            error = worker_errors.lost("decode", held.worker, event.message)
        self._attempt.drop_reservation()
        return self._recover(kind, held.worker, error)

    def reservation_broken(self, why: str) -> Met:
        """The worker of the held reservation lives and does wrong."""
        held = self._attempt.reservation
        assert held is not None, "no reservation to break"
        self._attempt.close_reservation()
        error = worker_errors.lost("decode", held.worker, why)
        return self._recover(FailureKind.RESERVATION_LOST, held.worker, error)

    def pull_failed(self, event: events.PullFailed) -> Met | None:
        """The hand-off broke off; lease and reservation stand."""
        held = self._attempt.pull_failed(event)
        if held is None:
            return None
        error = worker_errors.pull_failed(event.reason, event.message)
        return self._recover(pull_failure(event.reason), held.worker, error)

    def less_cached(self, held: DecodeReservation) -> Met:
        """It was chosen for a prefix that its worker does not have."""
        error = worker_errors.lost("decode", held.worker, "its prefix cache was overrated")
        return self._recover(FailureKind.LESS_CACHED, held.worker, error)

    def lease_silent(self, now: float) -> Met | None:
        """Look whether a lease that was asked for has been answered in time."""
        lease = self._attempt.lease
        if lease is None or not lease.is_opening or now < lease.due_s:
            return None
        self._attempt.close_lease()
        error = worker_errors.no_answer("prefill", lease.worker)
        return self._recover(FailureKind.LEASE_REFUSED, lease.worker, error)

    def grant_silent(self, now: float) -> Met | None:
        """Look whether a lease that was to let its reader in has said so in time."""
        held = self._attempt.reservation
        if held is None or not held.is_granting or now < held.due_s:
            return None
        return self.lease_broken("it did not let its reader in")

    def reservation_silent(self, now: float) -> Met | None:
        """Look whether a reservation that was asked for has been answered in time."""
        held = self._attempt.reservation
        if held is None or not held.is_reserving or now < held.due_s:
            return None
        self._attempt.close_reservation()
        error = worker_errors.no_answer("decode", held.worker)
        return self._recover(FailureKind.RESERVATION_REFUSED, held.worker, error)

    # What is done

    def placed(self, placement: Placement) -> None:
        """Tell what replaces the attempt that failed, if one did."""
        if self._retry.because is not None:
            is_local = isinstance(placement, DecodeOnly)
            again = Retry.RECOMPUTE if is_local else Retry.PREFILL_AGAIN
            self._do(actions.Retried(again, self._retry.because))
            self._retry.because = None

    def _recover(self, kind: FailureKind, worker: WorkerId, error: DiptychError) -> Met:
        recovery = decide(kind, self._held())
        self._blame(recovery.blame, worker, error)
        if kind is FailureKind.LOGITS:
            self._retry.had_bad_logits = True
        if recovery.costs_attempt and not self._retry.spend_attempt():
            return GiveUp(error)
        for rung in recovery.ladder:
            outcome = self._climb(rung, recovery, error)
            if outcome is not None:
                return outcome
        raise AssertionError(f"a ladder without an end: {recovery}")

    def _held(self) -> Held:
        attempt = self._attempt
        reservation = attempt.reservation
        return Held(
            lease=attempt.lease is not None,
            reservation=None if reservation is None else reservation.state,
            was_rebound=reservation is not None and reservation.was_rebound,
            is_paid=attempt.is_rebinding,
            had_bad_logits=self._retry.had_bad_logits,
            allow_recompute=self._allow_recompute and not self._placing.needs_prefill,
        )

    def _blame(self, blame: Blame, worker: WorkerId, error: DiptychError) -> None:
        attempt = self._attempt
        match blame:
            case Blame.NOBODY:
                pass
            case Blame.REFUSED:
                self._retry.refuse(worker, error)
            case Blame.WORKER:
                self._retry.fail(worker)
            case Blame.PAIR | Blame.SOURCE:
                assert attempt.lease is not None, "a pull without a lease"
                self._retry.fail_pair(attempt.lease.worker, worker)
                if blame is Blame.SOURCE:
                    self._retry.fail(attempt.lease.worker)
            case Blame.ALL:
                for each in {worker, *attempt.computing}:
                    self._retry.fail(each)
                is_changed = self._placing.error_if_changed() is not None
                if not is_changed and self._placing.ask() is None:
                    self._retry.forgive(worker)  # whoever told is the least suspect

    def _climb(self, rung: Rung, recovery: Recovery, error: DiptychError) -> Met | None:
        """Try one way out; None if it is none."""
        match rung:
            case Rung.OTHER_LEASE:
                return self._other_lease()
            case Rung.OTHER_RESERVATION:
                return self._other_reservation(recovery, error)
            case Rung.RECOMPUTE:
                return self._recompute(recovery, error)
            case Rung.BIND_AGAIN:
                return self._bind_again(recovery, error)
            case Rung.COMPUTE:
                self._tell(recovery, Retry.RECOMPUTE, error)
                return self._compute(Why.RECOMPUTE if recovery.is_retry else Why.CHOICE)
            case Rung.START_OVER:
                self._retry.because = error if recovery.is_retry else self._retry.because
                return Outcome.START_OVER
            case Rung.GIVE_UP:
                return GiveUp(error)
        assert_never(rung)

    def _other_lease(self) -> Outcome | None:
        other = self._placing.ask(on_reservation=self._attempt.reservation)
        match other:
            case Paired():
                if not self._attempt.may_ask(other.prefill, other):
                    return None
                self._attempt.pull_from(other.prefill)
                return Outcome.GOES_ON
            case DecodeOnly():
                return self._compute(other.why)
            case PrefillOnly() | None:
                return None

    def _other_reservation(self, recovery: Recovery, error: DiptychError) -> Outcome | None:
        lease = self._attempt.lease
        assert lease is not None, "no lease to pull from"
        other = self._placing.ask(on_prefill=lease.worker)
        if not isinstance(other, Paired) or not self._attempt.may_ask(other.decode, other):
            return None
        self._attempt.close_reservation()
        self._tell(recovery, Retry.REBIND, error)
        self._attempt.reserve(other.decode)
        return Outcome.GOES_ON

    def _bind_again(self, recovery: Recovery, error: DiptychError) -> Outcome:
        assert self._attempt.reservation is not None, "nothing to bind"
        self._attempt.reservation.was_rebound = True
        self._tell(recovery, Retry.REBIND, error)
        self._attempt.grant_if_held()
        return Outcome.GOES_ON

    def _recompute(self, recovery: Recovery, error: DiptychError) -> Outcome | None:
        """Only if a new placement would not prefill elsewhere, and this worker may."""
        self._attempt.close_lease()
        is_changed = self._placing.error_if_changed() is not None
        if not is_changed and isinstance(self._placing.ask(), Paired | PrefillOnly):
            return None
        if not isinstance(self._placing.ask(on_reservation=self._attempt.reservation), DecodeOnly):
            return None
        self._tell(recovery, Retry.RECOMPUTE, error)
        return self._compute(Why.RECOMPUTE)

    def _compute(self, why: Why) -> Outcome:
        runs = self._attempt.compute_on_reservation(why, self._emitted)
        return Outcome.RUNS if runs else Outcome.GOES_ON

    def _tell(self, recovery: Recovery, retry: Retry, error: DiptychError) -> None:
        if recovery.is_retry:
            self._do(actions.Retried(retry, error))
