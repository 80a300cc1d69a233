"""Speaks with a batch server over gRPC, for the commands of ``diptych batch``."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import grpc

from diptych.cli.batch_client import AwayError, BatchError, nobody_at
from diptych.client import BatchState, BlockingBatchClient
from diptych.errors import DiptychError

# Of a server that fails or is at its end, which may be well soon: what is 500 and more over HTTP.
_AWAY: Final = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
)


class GrpcBatchClient:
    """See :class:`diptych.cli.batch_client.BatchClient`. Not for use in an event loop."""

    def __init__(
        self,
        url: str,
        address: str,
        key: str = "",
        tls: bool | Path = False,
        server_name: str = "",
    ) -> None:
        """``url`` is what a person wrote. The block raises ConfigurationError."""
        self._url = url
        self._client = BlockingBatchClient(
            address, api_key=key, tls=tls, server_name=server_name, retries=0
        )

    def __enter__(self) -> Self:
        self._client.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._client.__exit__(kind, error, trace)

    def submit(self, path: Path, endpoint: str, completion_window: str) -> BatchState:
        """Upload a file and make a batch of it. Raises BatchError, OSError."""
        with self._told():
            return self._client.submit(path, endpoint, completion_window)

    def state(self, batch_id: str) -> BatchState:
        """How far it is. Raises BatchError."""
        with self._told():
            return self._client.state(batch_id)

    def cancel(self, batch_id: str) -> BatchState:
        """Send no more of it. Raises BatchError."""
        with self._told():
            return self._client.cancel(batch_id)

    def content(self, file_id: str) -> Iterator[bytes]:
        """What is in a file, piece by piece. Raises BatchError."""
        with self._told():
            yield from self._client.content(file_id)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """What goes wrong as a BatchError."""
        try:
            yield
        except DiptychError as error:
            if error.code not in _AWAY:
                raise BatchError(error.message) from None
            if error.code is grpc.StatusCode.UNAVAILABLE and error.reason == error.code.name:
                raise nobody_at(self._url, error.message) from None
            raise AwayError(error.message) from None  # it said so itself, or is there
