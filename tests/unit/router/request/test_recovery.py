"""Every failure against everything that may be held: the whole table of recoveries."""

import itertools

import pytest

from diptych.errors import (
    BlocksExhaustedError,
    DiptychError,
    InvalidRequestError,
    LeaseExpiredError,
    LogitsError,
    NoWorkerError,
    StepFailedError,
    WorkerDrainingError,
    WorkerLostError,
)
from diptych.v1 import decode_pb2
from router.placement.views import WorkerId
from router.request.decode_reservation import ReservationState
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
from router.request.worker_errors import broken_off

OVER = (Rung.START_OVER,)
GIVE_UP = Recovery((Rung.GIVE_UP,))
CERTAIN = {Rung.BIND_AGAIN, Rung.COMPUTE, Rung.START_OVER, Rung.GIVE_UP}
EVERYTHING = [
    Held(*given)
    for given in itertools.product(
        (False, True),  # lease
        (None, *ReservationState),
        (False, True),  # was_rebound
        (False, True),  # is_paid
        (False, True),  # had_bad_logits
        (False, True),  # allow_recompute
    )
]


def retry(*ladder: Rung, blame: Blame, costs_attempt: bool = True) -> Recovery:
    return Recovery(ladder, blame, costs_attempt=costs_attempt, is_retry=True)


def expected(kind: FailureKind, held: Held) -> Recovery:
    """The table, written down a second time and in another way."""
    has_reservation = held.reservation is not None
    only_token_missing = held.reservation is ReservationState.PROVEN and held.allow_recompute
    without_lease: tuple[Rung, ...] = OVER
    if has_reservation:
        without_lease = (Rung.COMPUTE,) if only_token_missing else (Rung.RECOMPUTE, *OVER)
    other_lease = (Rung.OTHER_LEASE, *OVER) if has_reservation else OVER
    other_reservation = (Rung.OTHER_RESERVATION, *OVER) if held.lease else OVER
    unpaid = not held.is_paid
    pair = retry(Rung.OTHER_RESERVATION, Rung.RECOMPUTE, *OVER, blame=Blame.PAIR)
    again = retry(Rung.BIND_AGAIN, blame=Blame.NOBODY)
    elsewhere = retry(*OVER, blame=Blame.ALL)
    return {
        FailureKind.LEASE_REFUSED: Recovery(other_lease, Blame.REFUSED),
        FailureKind.LEASE_LOST: retry(*without_lease, blame=Blame.WORKER, costs_attempt=unpaid),
        FailureKind.LEASE_EXPIRED: retry(*without_lease, blame=Blame.NOBODY, costs_attempt=unpaid),
        FailureKind.RESERVATION_REFUSED: Recovery(other_reservation, Blame.REFUSED),
        FailureKind.RESERVATION_LOST: retry(*other_reservation, blame=Blame.WORKER),
        FailureKind.PULL_FAILED: pair if held.was_rebound else again,
        FailureKind.PAIR_FAILED: pair,
        FailureKind.SOURCE_LOST: retry(Rung.RECOMPUTE, *OVER, blame=Blame.SOURCE),
        FailureKind.LESS_CACHED: Recovery((Rung.OTHER_LEASE, Rung.COMPUTE)),
        FailureKind.LOGITS: GIVE_UP if held.had_bad_logits else elsewhere,
        FailureKind.INVALID: GIVE_UP,
    }[kind]


@pytest.mark.parametrize("kind", FailureKind)
def test_every_failure_with_everything_that_may_be_held(kind: FailureKind) -> None:
    for held in EVERYTHING:
        assert decide(kind, held) == expected(kind, held), held


@pytest.mark.parametrize("kind", FailureKind)
def test_every_ladder_ends_in_a_way_out_that_is_certain_and_only_there(kind: FailureKind) -> None:
    for held in EVERYTHING:
        *uncertain, last = decide(kind, held).ladder
        assert last in CERTAIN
        assert not CERTAIN & set(uncertain)


def test_a_refusal_costs_nothing_and_what_can_never_succeed_is_not_tried_again() -> None:
    for held in EVERYTHING:
        for kind in (FailureKind.LEASE_REFUSED, FailureKind.RESERVATION_REFUSED):
            assert not decide(kind, held).costs_attempt
        assert decide(FailureKind.INVALID, held) == GIVE_UP


@pytest.mark.parametrize(
    ("error", "while_asked", "later"),
    [
        (BlocksExhaustedError("full"), "REFUSED", "LOST"),
        (WorkerDrainingError("bye"), "REFUSED", "LOST"),
        (NoWorkerError("gone"), "LOST", "LOST"),
        (LeaseExpiredError("nobody came"), "EXPIRED", "EXPIRED"),
        (LogitsError("nan"), "LOGITS", "LOGITS"),
        (InvalidRequestError("bad", field="spec"), "INVALID", "INVALID"),
    ],
)
def test_what_a_workers_error_means(error: DiptychError, while_asked: str, later: str) -> None:
    for wanted, asked in ((while_asked, True), (later, False)):
        lease = lease_failure(error, is_opening=asked)
        assert lease.name in (wanted, f"LEASE_{wanted}")
        reservation = reservation_failure(error, is_reserving=asked)
        wanted = "LOST" if wanted == "EXPIRED" else wanted  # only leases expire
        assert reservation.name in (wanted, f"RESERVATION_{wanted}")


def test_what_a_failed_pull_means() -> None:
    meaning = {reason: pull_failure(reason) for reason in decode_pb2.PullFailure.values()}
    again = {r for r, kind in meaning.items() if kind is FailureKind.PULL_FAILED}
    assert again == {
        decode_pb2.PULL_FAILURE_UNSPECIFIED,
        decode_pb2.PULL_FAILURE_TRANSPORT,
        decode_pb2.PULL_FAILURE_TICKET_INVALID,
        decode_pb2.PULL_FAILURE_UNPROVEN,
    }
    assert meaning.pop(decode_pb2.PULL_FAILURE_SOURCE_LOST) is FailureKind.SOURCE_LOST
    others = {kind for reason, kind in meaning.items() if reason not in again}
    assert others == {FailureKind.PAIR_FAILED}
    assert pull_failure(99) is FailureKind.PAIR_FAILED, "a reason that is not known yet"


@pytest.mark.parametrize(
    ("error", "had_begun", "told"),
    [
        (LeaseExpiredError("nobody came"), True, NoWorkerError),
        (NoWorkerError("draining"), False, NoWorkerError),
        (NoWorkerError("gone"), True, WorkerLostError),
        (StepFailedError("bad"), True, StepFailedError),
    ],
)
def test_what_a_client_is_told_of_what_broke_off(
    error: DiptychError, had_begun: bool, told: type[DiptychError]
) -> None:
    """A lease that no reader came for has cost nobody its worker."""
    said = broken_off("prefill", WorkerId("p:1", "p"), error, had_begun=had_begun)
    assert type(said) is told
    assert error.message in said.message
    assert "p:1" in said.message
