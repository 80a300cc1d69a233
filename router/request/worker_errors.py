"""What went wrong with a worker, as the error that a client gets if nothing helps. Pure."""

from diptych.errors import (
    RETRY_LATER_S,
    BlocksExhaustedError,
    DeadlineUnreachableError,
    DiptychError,
    LeaseExpiredError,
    ModelChangedError,
    NoWorkerError,
    QueueTimeoutError,
    StepFailedError,
    TransferInterruptedError,
    WorkerDrainingError,
    WorkerLostError,
)
from diptych.v1 import decode_pb2
from router.placement.placement import Unreachable
from router.placement.views import WorkerId

_REFUSALS = (BlocksExhaustedError.reason, WorkerDrainingError.reason)


def is_refusal(error: DiptychError) -> bool:
    """Whether a worker that says this, when asked, may be asked again later."""
    return error.reason in _REFUSALS


def is_leaving(error: DiptychError) -> bool:
    """Whether a worker that says this will soon be gone."""
    return error.reason == WorkerDrainingError.reason


def no_worker() -> DiptychError:
    """There was nobody to take the request in time."""
    return NoWorkerError("no worker can take the request now", retry_after_s=RETRY_LATER_S)


def none_fits(*, needs_prefill: bool) -> DiptychError:
    """There are workers, and they could not take the request however idle they were."""
    message = "no worker that is there can take the request, busy or not"
    if needs_prefill:
        message += ": a prefill worker tells of its prompt, and another decodes more than one token"
    return NoWorkerError(message, retry_after_s=RETRY_LATER_S)


def unreachable(found: Unreachable) -> DiptychError:
    """Its objectives are foretold to be missed."""
    return DeadlineUnreachableError(found.what, retry_after_s=found.retry_after_s)


def queue_timeout(retry_after_s: float) -> DiptychError:
    """There are workers, and others kept them busy all the time."""
    message = "the request waited too long behind others"
    return QueueTimeoutError(message, retry_after_s=retry_after_s)


def model_changed(began: str, served: str) -> DiptychError:
    """The answer is of a model of another digest than all workers have that could go on with it.

    It may have other weights or another config, or a release makes digests in another way.

    ``served``, of which nothing may be cut off, comes before ``began``, which a client may have
    written; empty: workers do not say what they have.
    """
    unknown = "workers do not say which model they have"
    now = f"a model of digest {served} is served now" if served else unknown
    return ModelChangedError(
        f"{now}; the answer began with a model of digest {began}: ask anew, without what came"
    )


def no_answer(role: str, worker: WorkerId) -> DiptychError:
    """A worker neither took nor refused in time."""
    message = f"{role} worker {worker.address} did not answer in time"
    return NoWorkerError(message, retry_after_s=RETRY_LATER_S)


def lost(role: str, worker: WorkerId, why: str) -> DiptychError:
    """A worker, or what it held, is gone or broken."""
    message = f"{role} worker {worker.address} was lost: {why}"
    return WorkerLostError(message, retry_after_s=RETRY_LATER_S)


def broken_off(
    role: str, worker: WorkerId, error: DiptychError, *, had_begun: bool
) -> DiptychError:
    """A worker ended what it held, or never took it, and said this.

    A step that failed stays one: it may be the request's own doing, and would fail again.
    """
    if isinstance(error, StepFailedError):
        return StepFailedError(f"{role} worker {worker.address}: {error.message}")
    if not had_begun or error.reason == LeaseExpiredError.reason:  # nobody was lost by it
        message = f"{role} worker {worker.address}: {error.message}"
        return NoWorkerError(message, retry_after_s=RETRY_LATER_S)
    return lost(role, worker, error.message)


def pull_failed(pull_failure: int, message: str) -> DiptychError:
    """The hand-off broke off; ``cause`` in its metadata is the PullFailure in lower case."""
    value = decode_pb2.PullFailure.DESCRIPTOR.values_by_number.get(pull_failure)
    cause = "unknown" if value is None else value.name.removeprefix("PULL_FAILURE_").lower()
    return TransferInterruptedError(f"the hand-off failed ({cause}): {message}", cause=cause)


def ended(error: DiptychError | None) -> DiptychError:
    """What a worker said at the end of a lease or of a sequence that had not finished."""
    if error is None:
        return NoWorkerError("it ended the sequence without a reason")
    if is_refusal(error) and error.retry_after_s is None:
        error.retry_after_s = RETRY_LATER_S
    return error
