"""What the commands of ``diptych batch`` know of a batch server, in whatever protocol."""

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from diptych.client.batches import BatchState


class BatchError(Exception):
    """The server refused, or could not be reached; the text is for people."""


class AwayError(BatchError):
    """It could not be reached, the connection broke, or it cannot answer now."""


class BatchClient(Protocol):
    """A connection to one server. A context manager."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def submit(self, path: Path, endpoint: str, completion_window: str) -> BatchState:
        """Upload a file and make a batch of it. Raises BatchError, OSError."""
        ...

    def state(self, batch_id: str) -> BatchState:
        """How far it is. Raises BatchError."""
        ...

    def cancel(self, batch_id: str) -> BatchState:
        """Send no more of it. Raises BatchError."""
        ...

    def content(self, file_id: str) -> Iterator[bytes]:
        """What is in a file, piece by piece. Raises BatchError."""
        ...


def nobody_at(url: str, why: str) -> AwayError:
    """The error of an address at which nobody answers."""
    return AwayError(
        f"no batch server at {url} ({why}): start one with diptych batch-server, or with "
        "diptych up --batch-port 8001, or say with --url where it is"
    )
