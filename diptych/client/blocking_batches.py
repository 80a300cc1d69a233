"""The client of batch servers for code without an event loop."""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from diptych.client.batches import DEFAULT_WINDOW, NO_METADATA, RETRIES, BatchClient, BatchState
from diptych.client.own_loop import OwnLoop


class BlockingBatchClient(OwnLoop[BatchClient]):
    """BatchClient for code without an event loop. A context manager; not for use in one."""

    def __init__(
        self,
        address: str,
        *,
        api_key: str = "",
        tls: bool | Path = False,
        server_name: str = "",
        retries: int = RETRIES,
    ) -> None:
        """As BatchClient."""
        super().__init__(
            partial(
                BatchClient,
                address,
                api_key=api_key,
                tls=tls,
                server_name=server_name,
                retries=retries,
            )
        )

    def submit(
        self,
        path: Path,
        endpoint: str,
        completion_window: str = DEFAULT_WINDOW,
        metadata: Mapping[str, str] = NO_METADATA,
    ) -> BatchState:
        """Upload a file and make a batch of it. Raises OSError, DiptychError."""
        return self._ask(self._client.submit(path, endpoint, completion_window, metadata))

    def upload(self, path: Path) -> str:
        """The id of a file that is stored now. Raises OSError, DiptychError."""
        return self._ask(self._client.upload(path))

    def create(
        self,
        file_id: str,
        endpoint: str,
        completion_window: str = DEFAULT_WINDOW,
        metadata: Mapping[str, str] = NO_METADATA,
    ) -> BatchState:
        """Have an uploaded file answered. Raises DiptychError."""
        return self._ask(self._client.create(file_id, endpoint, completion_window, metadata))

    def state(self, batch_id: str) -> BatchState:
        """How far it is. Raises DiptychError."""
        return self._ask(self._client.state(batch_id))

    def watch(self, batch_id: str) -> Iterator[BatchState]:
        """How far it is, until it has ended, see :meth:`BatchClient.watch`."""
        return self._each(self._client.watch(batch_id))

    def batches(self, limit: int = 20, after: str = "") -> list[BatchState]:
        """Up to ``limit``, the newest first, behind the one of that id. Raises DiptychError."""
        return self._ask(self._client.batches(limit, after))

    def cancel(self, batch_id: str) -> BatchState:
        """Send no more of it. Raises DiptychError."""
        return self._ask(self._client.cancel(batch_id))

    def content(self, file_id: str) -> Iterator[bytes]:
        """What is in a file, piece by piece. Raises DiptychError."""
        return self._each(self._client.content(file_id))

    def delete(self, file_id: str) -> None:
        """Make room. Raises DiptychError."""
        self._ask(self._client.delete(file_id))
