"""HTTP/1.1 of one connection, with a bound on what a client may send before its request begins."""

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES: Final = 65_536
_HEAD_PATIENCE_S: Final = 30.0


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's, which by itself keeps a request's line and headers however long they are.

    A head that is too long is answered with 400, and a connection that has none for too
    long is closed. Event loop only.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_head_bytes = 0
        self._is_in_head = True
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(_HEAD_PATIENCE_S, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        super().data_received(data)
        if self._is_in_head and not self.transport.is_closing():
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self.send_400_response("The request's head is too long.")

    def on_message_begin(self) -> None:
        """See httptools."""
        super().on_message_begin()
        self._is_in_head = True
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(_HEAD_PATIENCE_S, self.transport.abort)

    def on_headers_complete(self) -> None:
        """See httptools."""
        super().on_headers_complete()
        self._end_head()

    def _end_head(self) -> None:
        self._is_in_head = False
        self._num_head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
