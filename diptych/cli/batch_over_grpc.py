"""Speaks with a batch server over gRPC, for the commands of ``diptych batch``."""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc

from diptych.cli.batch_client import AwayError, BatchError, nobody_at
from diptych.client.batches import BatchClient, BatchState
from diptych.errors import DiptychError

T = TypeVar("T")


class GrpcBatchClient:
    """See :class:`diptych.cli.batch_client.BatchClient`. Not for use in an event loop."""

    def __init__(self, url: str, address: str, key: str = "", tls: bool | Path = False) -> None:
        """``url`` is what a person wrote. Raises ConfigurationError."""
        self._url = url
        self._runner = asyncio.Runner()
        try:
            self._client = self._runner.run(_open(address, key, tls))
        except BaseException:
            self._runner.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._runner.run(self._client.close())
        self._runner.close()

    def submit(self, path: Path, endpoint: str, completion_window: str) -> BatchState:
        """Upload a file and make a batch of it. Raises BatchError, OSError."""
        return self._ask(self._client.submit(path, endpoint, completion_window))

    def state(self, batch_id: str) -> BatchState:
        """How far it is. Raises BatchError."""
        return self._ask(self._client.state(batch_id))

    def cancel(self, batch_id: str) -> BatchState:
        """Send no more of it. Raises BatchError."""
        return self._ask(self._client.cancel(batch_id))

    def content(self, file_id: str) -> Iterator[bytes]:
        """What is in a file, piece by piece. Raises BatchError."""
        pieces = self._client.content(file_id)

        async def take() -> bytes | None:
            return await anext(pieces, None)

        try:
            while (piece := self._ask(take())) is not None:
                yield piece
        finally:
            self._runner.run(pieces.aclose())

    def _ask(self, question: Coroutine[Any, Any, T]) -> T:
        with self._told():
            return self._runner.run(question)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """What goes wrong as a BatchError."""
        try:
            yield
        except DiptychError as error:
            if error.code is not grpc.StatusCode.UNAVAILABLE:
                raise BatchError(error.message) from None
            if error.reason != error.code.name:  # it said so itself
                raise AwayError(error.message) from None
            raise nobody_at(self._url, error.message) from None


async def _open(address: str, key: str, tls: bool | Path) -> BatchClient:
    return BatchClient(address, api_key=key, tls=tls, retries=0)
