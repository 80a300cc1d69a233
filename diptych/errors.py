"""Domain errors. The only place where a failure gets its gRPC status code.

One class per reason, named by what the caller has to do about it. A raised
``DiptychError`` crosses the wire as ``google.rpc.Status`` with an ``ErrorInfo``
(AIP-193), see :mod:`diptych.rpc`; inside a multiplexed stream it travels as
``diptych.v1.Failure``. Everything else is a bug and becomes ``INTERNAL`` with
an id only; or it ends the process, as :class:`DeviceLostError` does.
"""

from typing import ClassVar

import grpc

DOMAIN = "diptych.dev"

# What ``retry_after_s`` says, s, wherever nothing better is known.
RETRY_SOON_S = 0.05  # each step frees blocks
# A guess: what has to pass first (a worker's start, a prompt's tokenising, a router's end) has no
# time of its own that is known. The waiting room, which knows how soon requests end, says more.
RETRY_LATER_S = 1.0  # a worker, or a place in a queue


class DiptychError(Exception):
    """Base of every error a caller may act on.

    ``metadata`` holds short strings for machines; ``retry_after_s`` is set where
    waiting helps.
    """

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    reason: ClassVar[str] = "INTERNAL"

    def __init__(
        self, message: str, *, retry_after_s: float | None = None, **metadata: str
    ) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s
        self.metadata = metadata


def all_reasons() -> list[str]:
    """Every reason that an error may have, sorted; INTERNAL is what is none of the others."""
    kinds: list[type[DiptychError]] = [DiptychError, *DiptychError.__subclasses__()]
    return sorted({kind.reason for kind in kinds})


def reasons_with(code: grpc.StatusCode) -> frozenset[str]:
    """The reasons of all errors that have this status code."""
    return frozenset(kind.reason for kind in DiptychError.__subclasses__() if kind.code is code)


class InvalidRequestError(DiptychError):
    """The caller sent something that can never succeed; ``field`` says what."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "REQUEST_INVALID"

    def __init__(self, message: str, *, field: str) -> None:
        super().__init__(f"{field}: {message}", field=field)
        self.field = field


class NotServedError(DiptychError):
    """This router has no such method, or not yet."""

    code = grpc.StatusCode.UNIMPLEMENTED
    reason = "NOT_SERVED"


class ModelNotFoundError(DiptychError):
    """No such model here; the message lists those there are."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "MODEL_NOT_FOUND"


class NotFoundError(DiptychError):
    """No such file or batch of the caller's; ``field`` says which was meant."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "NOT_FOUND"


class FileTooLargeError(DiptychError):
    """The file has more bytes than one may have. Make it several."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "FILE_TOO_LARGE"


class StorageFullError(DiptychError):
    """The caller's tenant keeps too much already. Delete some of it."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "STORAGE_FULL"


class DiskFullError(DiptychError):
    """There is no room where the server stores things, whoever asks. Its operator makes some."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "DISK_FULL"


class DatabaseAwayError(DiptychError):
    """What the server stores things in does not answer, or somebody else holds it. Try later."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "DATABASE_AWAY"


class BatchNotOpenError(DiptychError):
    """The batch has ended, or all its lines have: too late to cancel it."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "BATCH_NOT_OPEN"


class InvalidApiKeyError(DiptychError):
    """The caller gave no key, or one that is not known, or not any more."""

    code = grpc.StatusCode.UNAUTHENTICATED
    reason = "INVALID_API_KEY"


class PeerNotAllowedError(DiptychError):
    """The caller's certificate is of no role that may call this."""

    code = grpc.StatusCode.PERMISSION_DENIED
    reason = "PEER_NOT_ALLOWED"


class ClassNotAllowedError(DiptychError):
    """The caller's requests may not be as urgent as this one wants to be."""

    code = grpc.StatusCode.PERMISSION_DENIED
    reason = "CLASS_NOT_ALLOWED"


class TicketInvalidError(DiptychError):
    """Unknown, revoked or somebody else's ticket. The router grants a new one."""

    code = grpc.StatusCode.PERMISSION_DENIED
    reason = "TICKET_INVALID"


class BlocksExhaustedError(DiptychError):
    """The KV cache has too few free blocks. Retry on another worker, or later."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "KV_BLOCKS_EXHAUSTED"


class BlocksComingError(BlocksExhaustedError):
    """Sequences that give way hold enough of them and leave. Ask again after the next step."""


class QueueFullError(DiptychError):
    """The router holds as many requests as it may. Back off."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "QUEUE_FULL"


class QueueTimeoutError(DiptychError):
    """The request waited as long as it may, behind others. Back off."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "QUEUE_TIMEOUT"


class DeadlineUnreachableError(DiptychError):
    """The request's first token, or its pace, is foretold to miss what it wants. Back off."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "DEADLINE_UNREACHABLE"


class QuotaExceededError(DiptychError):
    """The caller's tenant has used up what it may take; ``quota`` names what ran out. Back off."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "QUOTA_EXCEEDED"


class WorkerDrainingError(DiptychError):
    """The worker shuts down. Try another."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "WORKER_DRAINING"


class NoWorkerError(DiptychError):
    """No placement can serve this now. Try later."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "NO_WORKER"


class WorkerLostError(DiptychError):
    """All workers that took the request were lost amid it, which may be its own doing."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "WORKER_LOST"


class DeadlineExceededError(DiptychError):
    """The request's own deadline passed."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "DEADLINE_EXCEEDED"


class RouterLostError(DiptychError):
    """A worker has not heard of the stream's router for too long. Open a new stream."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "ROUTER_LOST"


class SlowClientError(DiptychError):
    """The client read too slowly and its buffer is full."""

    code = grpc.StatusCode.ABORTED
    reason = "CLIENT_TOO_SLOW"


class TransferInterruptedError(DiptychError):
    """The hand-off broke off before it was proven. Prefill again."""

    code = grpc.StatusCode.ABORTED
    reason = "KV_TRANSFER_INTERRUPTED"


class ModelChangedError(DiptychError):
    """The answer began with a model of another digest than is served now, and did not go on.

    Ask anew, without what came.
    """

    code = grpc.StatusCode.ABORTED
    reason = "MODEL_CHANGED"


class LeaseExpiredError(DiptychError):
    """The lease ended before it was used. Prefill again."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "LEASE_EXPIRED"


class KVUnprovenError(DiptychError):
    """What landed is not what was announced. Prefill again; an alarm."""

    code = grpc.StatusCode.DATA_LOSS
    reason = "KV_UNPROVEN"


class LayoutMismatchError(DiptychError):
    """Two workers' caches do not fit; the message names the field and both values."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "KV_LAYOUT_MISMATCH"


class LogitsError(DiptychError):
    """The model's scores for a sequence are not numbers. Tried once elsewhere: it may be the KV."""

    code = grpc.StatusCode.INTERNAL
    reason = "LOGITS_NOT_FINITE"


class StepFailedError(DiptychError):
    """A model step broke off, for all its sequences or for one of them. Try another worker."""

    code = grpc.StatusCode.INTERNAL
    reason = "STEP_FAILED"


class ConfigurationError(DiptychError):
    """A setting or file is wrong; stops the process at start with one line."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "CONFIGURATION_INVALID"


class DeviceLostError(Exception):
    """The device, or its memory, cannot be used again: the worker has to end.

    Raised by whoever waits for the device, on the model thread or the transfer's. No caller can
    act on it, so it has no reason on the wire.
    """


class DeviceMemoryError(Exception):
    """A step needed more memory than the device has left: its sequences end, nothing else does.

    Not of the wire either: clients are told that the step failed.
    """
