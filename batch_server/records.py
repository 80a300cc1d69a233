"""What the batch server keeps: files, batches, their lines and results. Pure."""

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, get_args

from batch_server.status import BatchStatus

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
"""What the lines of a batch are asked of."""

ENDPOINTS: Final[tuple[Endpoint, ...]] = get_args(Endpoint)
FileKind = Literal["file", "batch"]
_BEGINS: Final[Mapping[FileKind, str]] = {"file": "file-", "batch": "batch_"}
_MADE: Final = re.compile("[0-9a-f]{30}")  # the microsecond, and 64 bits by chance


def new_id(kind: FileKind, now_s: float) -> str:
    """An id that sorts by when it was made, and that nobody guesses."""
    return f"{_BEGINS[kind]}{int(now_s * 1_000_000):014x}{secrets.token_hex(8)}"


def is_id(kind: FileKind, given: str) -> bool:
    """Whether it says when one was made, be that there or gone."""
    begin = _BEGINS[kind]
    return given.startswith(begin) and _MADE.fullmatch(given, len(begin)) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file. The content of one with a ``batch_id`` is that batch's results."""

    file_id: str
    tenant: str
    purpose: str
    filename: str
    created_s: int
    num_bytes: int
    batch_id: str | None = None
    is_errors: bool = False


class LineError(NamedTuple):
    """What is wrong with a file of requests; ``line`` counts from 1, None: the whole file."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch as it is stored. Times are seconds of the Unix epoch."""

    batch_id: str
    tenant: str
    endpoint: Endpoint
    input_file_id: str
    completion_window: str
    status: BatchStatus
    created_s: int
    expires_s: int
    moved_s: Mapping[BatchStatus, int] = field(default_factory=dict)
    """When it came to each state that it was in after the first."""
    output_file_id: str | None = None
    error_file_id: str | None = None
    metadata: Mapping[str, str] | None = None
    errors: Sequence[LineError] = ()
    num_lines: int = 0
    num_completed: int = 0
    num_failed: int = 0
    num_unsent: int = 0
    """Of the failed those that nobody answered in time."""


class Line(NamedTuple):
    """One request of a batch; it never changes once it is stored."""

    number: int
    """In the file, from 1."""
    rank: int
    """In the order in which lines are sent, from 0."""
    custom_id: str
    request_id: str
    body: bytes = b""
    """What is sent, as JSON; it has a seed, so that the same is answered each time. Empty once
    it is stored: it is read when it is sent."""


class LineOwner(NamedTuple):
    """Whose line it is."""

    tenant: str
    batch_id: str


class LineResult(NamedTuple):
    """What became of a line: written once, whoever comes second changes nothing."""

    number: int
    is_error: bool
    line: bytes
    """Of the output or error file, with its newline."""
