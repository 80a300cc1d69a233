"""What a failure is to a client of the HTTP API: a status and OpenAI's error object. Pure."""

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

from diptych.errors import DeadlineUnreachableError, DiptychError, ModelNotFoundError

MAX_MESSAGE_CHARACTERS: Final = 1024

_RETRY_STATUSES: Final = frozenset({429, 503})
_LEAST_RETRY_S: Final = 1  # the header has whole seconds

# Of each reason the status: what the caller should do, in HTTP's words.
STATUSES: Final[Mapping[str, int]] = {
    "REQUEST_INVALID": 400,
    "INVALID_API_KEY": 401,
    "CLASS_NOT_ALLOWED": 403,
    "MODEL_NOT_FOUND": 404,
    "NOT_FOUND": 404,
    "BATCH_NOT_OPEN": 409,
    "FILE_TOO_LARGE": 413,
    "STORAGE_FULL": 413,
    "DISK_FULL": 507,
    "NOT_SERVED": 501,
    "KV_BLOCKS_EXHAUSTED": 429,
    "QUEUE_FULL": 429,
    "QUEUE_TIMEOUT": 429,
    "QUOTA_EXCEEDED": 429,
    "DEADLINE_UNREACHABLE": 429,
    "DATABASE_AWAY": 503,
    "NO_WORKER": 503,
    "WORKER_LOST": 503,
    "WORKER_DRAINING": 503,
    "ROUTER_LOST": 503,
    "LEASE_EXPIRED": 503,
    "KV_TRANSFER_INTERRUPTED": 503,
    "MODEL_CHANGED": 503,
    "KV_UNPROVEN": 503,
    "CLIENT_TOO_SLOW": 408,
    "DEADLINE_EXCEEDED": 504,
    "KV_LAYOUT_MISMATCH": 500,
    "CONFIGURATION_INVALID": 500,
    "LOGITS_NOT_FINITE": 500,
    "STEP_FAILED": 500,
    "TICKET_INVALID": 500,
    "PEER_NOT_ALLOWED": 500,
    "INTERNAL": 500,
}
_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
    507: "server_error",
}


class RefusedError(Exception):
    """HTTP itself is used wrongly: a status that no request of the cluster's API ends with."""

    def __init__(self, status: int, message: str, code: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param


class ErrorAnswer(NamedTuple):
    """A failure as it is sent."""

    status: int
    message: str
    param: str | None
    code: str
    retry_after_s: int | None = None

    @property
    def content(self) -> Mapping[str, object]:
        """OpenAI's error object."""
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }


def answer_to(error: DiptychError | RefusedError) -> ErrorAnswer:
    """The answer to a request that was refused or failed."""
    if isinstance(error, RefusedError):
        return _answer(error.status, error.message, error.param, error.code)
    status = STATUSES.get(error.reason, 500)
    param = error.metadata.get("field")
    if isinstance(error, ModelNotFoundError):
        param = "model"
    answer = _answer(status, error.message, param, error.reason.lower(), error.retry_after_s)
    if error.reason == DeadlineUnreachableError.reason and error.retry_after_s is None:
        return answer._replace(retry_after_s=None)  # to come back would not help
    return answer


def reason_of(error: DiptychError | RefusedError) -> str:
    """The outcome that is counted: of HTTP's own refusals that of a like one over gRPC."""
    if isinstance(error, DiptychError):
        return error.reason
    return "CLIENT_TOO_SLOW" if error.status == 408 else "REQUEST_INVALID"


def bug(request_id: str) -> ErrorAnswer:
    """Of a bug the client learns under which id it was logged, and nothing else."""
    return _answer(500, f"internal error in request {request_id}", None, "internal")


def _answer(
    status: int,
    message: str,
    param: str | None,
    code: str,
    retry_after_s: float | None = None,
) -> ErrorAnswer:
    retry_s = None
    if status in _RETRY_STATUSES:
        retry_s = max(_LEAST_RETRY_S, math.ceil(retry_after_s or 0))
    return ErrorAnswer(
        status,
        message[:MAX_MESSAGE_CHARACTERS],
        None if param is None else param[:MAX_MESSAGE_CHARACTERS],
        code,
        retry_s,
    )
