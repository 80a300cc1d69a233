"""What is done when a part of an attempt fails: one decision, a table. Pure, without state.

``decide`` says from the kind of the failure and from what is still held which ways out to
try, in which order, what it costs and who is to be avoided. It knows neither workers
nor placement; :class:`router.request.fail_over.FailOver` climbs the ladder.
"""

import enum
from dataclasses import dataclass, replace
from typing import NamedTuple, assert_never

from diptych.errors import (
    DiptychError,
    InvalidRequestError,
    LeaseExpiredError,
    LogitsError,
)
from diptych.v1 import decode_pb2
from router.request.decode_reservation import ReservationState
from router.request.worker_errors import is_refusal

_MAY_BIND_AGAIN = frozenset(
    {
        decode_pb2.PULL_FAILURE_UNSPECIFIED,
        decode_pb2.PULL_FAILURE_TRANSPORT,
        decode_pb2.PULL_FAILURE_TICKET_INVALID,
        decode_pb2.PULL_FAILURE_UNPROVEN,
    }
)


class FailureKind(enum.Enum):
    """What went wrong. What a refusal or loss is about, lease or reservation, is held no more."""

    LEASE_REFUSED = enum.auto()  # or no answer in time
    LEASE_LOST = enum.auto()
    LEASE_EXPIRED = enum.auto()  # no reader came in time: its worker is not to blame
    RESERVATION_REFUSED = enum.auto()  # or no answer in time
    RESERVATION_LOST = enum.auto()
    PULL_FAILED = enum.auto()  # the same pair may succeed
    PAIR_FAILED = enum.auto()  # the same pair would fail again
    SOURCE_LOST = enum.auto()  # the reader says that the lease's worker is gone
    LESS_CACHED = enum.auto()  # a reservation lacks a prefix that it was chosen for
    LOGITS = enum.auto()  # a worker computed scores that are not numbers
    INVALID = enum.auto()  # a worker says that the request can never succeed


class Rung(enum.Enum):
    """One way out. All but the last three may turn out to be impossible."""

    OTHER_LEASE = enum.auto()  # another prefill worker for the held reservation
    OTHER_RESERVATION = enum.auto()  # another decode worker for the held lease
    RECOMPUTE = enum.auto()  # on the held reservation, if no prefill worker can serve it
    BIND_AGAIN = enum.auto()  # the held reservation pulls from the held lease once more
    COMPUTE = enum.auto()  # the held reservation computes what it lacks
    START_OVER = enum.auto()  # free lease and reservation, place anew, at once or through the queue
    GIVE_UP = enum.auto()  # the client gets the error


class Blame(enum.Enum):
    """Whom the request avoids from now on."""

    NOBODY = enum.auto()
    REFUSED = enum.auto()  # whose worker it is, until the request is placed or waits
    WORKER = enum.auto()  # whose worker it is, until the request has to wait
    PAIR = enum.auto()  # the two workers together
    SOURCE = enum.auto()  # the two together, and the lease's worker
    ALL = enum.auto()  # every worker that computed, if there is anybody else


class Held(NamedTuple):
    """What is left of the attempt when the failure is known, and what was spent before."""

    lease: bool = False
    reservation: ReservationState | None = None
    was_rebound: bool = False  # the reservation's pull was repeated already
    is_paid: bool = False  # its reader noticed a lost lease first: the attempt was spent then
    had_bad_logits: bool = False  # earlier in this request
    allow_recompute: bool = True


@dataclass(frozen=True, slots=True)
class Recovery:
    """What to do: the first rung of ``ladder`` that can be done.

    ``costs_attempt``: it fails the request if no attempt is left. ``is_retry``: what is
    done instead is counted and shown; a refusal is none.
    """

    ladder: tuple[Rung, ...]
    blame: Blame = Blame.NOBODY
    costs_attempt: bool = False
    is_retry: bool = False


_START_OVER = (Rung.START_OVER,)
_WITHOUT_LEASE = (Rung.RECOMPUTE, Rung.START_OVER)
_GIVE_UP = Recovery((Rung.GIVE_UP,))


def decide(failure: FailureKind, held: Held) -> Recovery:
    """The one place where a failure's consequence is chosen. Every ladder ends certainly."""
    match failure:
        case FailureKind.LEASE_REFUSED:
            ladder = _START_OVER if held.reservation is None else (Rung.OTHER_LEASE, *_START_OVER)
            return Recovery(ladder, Blame.REFUSED)
        case FailureKind.RESERVATION_REFUSED:
            ladder = (Rung.OTHER_RESERVATION, *_START_OVER) if held.lease else _START_OVER
            return Recovery(ladder, Blame.REFUSED)
        case FailureKind.LEASE_LOST:
            return _without_lease(held, Blame.WORKER)
        case FailureKind.LEASE_EXPIRED:
            return _without_lease(held, Blame.NOBODY)
        case FailureKind.RESERVATION_LOST:
            ladder = (Rung.OTHER_RESERVATION, *_START_OVER) if held.lease else _START_OVER
            return _retry(ladder, Blame.WORKER)
        case FailureKind.PULL_FAILED:
            if held.was_rebound:
                return decide(FailureKind.PAIR_FAILED, held)
            return _retry((Rung.BIND_AGAIN,), Blame.NOBODY)
        case FailureKind.PAIR_FAILED:
            return _retry((Rung.OTHER_RESERVATION, *_WITHOUT_LEASE), Blame.PAIR)
        case FailureKind.SOURCE_LOST:
            return _retry(_WITHOUT_LEASE, Blame.SOURCE)
        case FailureKind.LESS_CACHED:
            return Recovery((Rung.OTHER_LEASE, Rung.COMPUTE))
        case FailureKind.LOGITS:
            return _GIVE_UP if held.had_bad_logits else _retry(_START_OVER, Blame.ALL)
        case FailureKind.INVALID:
            return _GIVE_UP
    assert_never(failure)


def lease_failure(error: DiptychError, *, is_opening: bool) -> FailureKind:
    """What the end of a lease's stream means."""
    kind = _of_request(error)
    if kind is not None:
        return kind
    if is_opening and is_refusal(error):
        return FailureKind.LEASE_REFUSED
    is_expired = error.reason == LeaseExpiredError.reason
    return FailureKind.LEASE_EXPIRED if is_expired else FailureKind.LEASE_LOST


def reservation_failure(error: DiptychError, *, is_reserving: bool) -> FailureKind:
    """What a decode worker's last word means, other than that it finished."""
    kind = _of_request(error)
    if kind is not None:
        return kind
    is_refused = is_reserving and is_refusal(error)
    return FailureKind.RESERVATION_REFUSED if is_refused else FailureKind.RESERVATION_LOST


def pull_failure(reason: int) -> FailureKind:
    """What a decode_pb2.PullFailure means."""
    if reason == decode_pb2.PULL_FAILURE_SOURCE_LOST:
        return FailureKind.SOURCE_LOST
    return FailureKind.PULL_FAILED if reason in _MAY_BIND_AGAIN else FailureKind.PAIR_FAILED


def _of_request(error: DiptychError) -> FailureKind | None:
    if isinstance(error, InvalidRequestError):
        return FailureKind.INVALID
    return FailureKind.LOGITS if isinstance(error, LogitsError) else None


def _retry(ladder: tuple[Rung, ...], blame: Blame) -> Recovery:
    return Recovery(ladder, blame, costs_attempt=True, is_retry=True)


def _without_lease(held: Held, blame: Blame) -> Recovery:
    if held.reservation is None:
        ladder: tuple[Rung, ...] = _START_OVER
    elif held.reservation is ReservationState.PROVEN and held.allow_recompute:
        ladder = (Rung.COMPUTE,)  # only the token is missing, not the KV
    else:
        ladder = _WITHOUT_LEASE
    return replace(_retry(ladder, blame), costs_attempt=not held.is_paid)
