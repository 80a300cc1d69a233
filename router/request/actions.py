"""What a request's state machine wants done. Executed at once and in order by its session."""

import enum
from typing import NamedTuple

from diptych.errors import DiptychError
from router.placement.placement import Why
from router.placement.views import WorkerId


class Retry(enum.StrEnum):
    """What was done instead of the attempt that failed (a metric's label)."""

    REBIND = "rebind"
    PREFILL_AGAIN = "prefill_again"
    RECOMPUTE = "recompute"


class Enqueue(NamedTuple):
    """Wait for a placement; ``front``: the request, or a choice of it, was placed before."""

    front: bool


class Dequeue(NamedTuple):
    """Wait no longer; ``is_placed``: a placement was found, so the request keeps a slot."""

    is_placed: bool


class Settled(NamedTuple):
    """Workers granted all that the placement of one that waited again asked of them."""


class Pump(NamedTuple):
    """The time to try again has come: offer the queue what there is."""


class OpenLease(NamedTuple):
    """Open the Prefill stream with the prompt and the first ``num_emitted`` output tokens."""

    worker: WorkerId
    sequence_id: int
    num_emitted: int


class Grant(NamedTuple):
    """Send a Grant on the lease's stream."""

    sequence_id: int
    grant_id: int
    ticket: bytes
    reader: WorkerId


class CloseLease(NamedTuple):
    """End the lease's stream."""

    sequence_id: int


class Reserve(NamedTuple):
    """Send a Reserve for the prompt and the first ``num_emitted`` output tokens."""

    worker: WorkerId
    sequence_id: int
    num_emitted: int
    to_pull: bool  # from a lease; else the worker computes what it lacks


class Bind(NamedTuple):
    """Send a Bind to the reservation."""

    sequence_id: int
    bind_id: int
    source: WorkerId
    ticket: bytes
    first_missing_token: int


class Start(NamedTuple):
    """Send a Start to the reservation."""

    sequence_id: int
    emitted: tuple[int, ...]
    compute_missing: bool
    emitted_age_s: float = 0.0  # for how long the last of them has been out


class Release(NamedTuple):
    """Send a Release for the reservation."""

    sequence_id: int


class RunLocally(NamedTuple):
    """Count and mark that a decode worker computes the KV itself."""

    why: Why


class Retried(NamedTuple):
    """Count and mark a fail-over."""

    retry: Retry
    cause: DiptychError


class Finish(NamedTuple):
    """The answer is whole. Last action of a request."""

    reason: int  # common_pb2.FinishReason


class Fail(NamedTuple):
    """There will be no answer. Last action of a request."""

    error: DiptychError


Action = (
    Enqueue
    | Dequeue
    | Settled
    | Pump
    | OpenLease
    | Grant
    | CloseLease
    | Reserve
    | Bind
    | Start
    | Release
    | RunLocally
    | Retried
    | Finish
    | Fail
)
