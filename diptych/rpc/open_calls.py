"""The calls that a server has open, so that it ends them with a status before gRPC does with none.

A server that is stopped cancels what is open: clients see CANCELLED, as of what they ended
themselves, or UNAVAILABLE without a reason. And it takes an answer for given that is on its way.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import grpc

from diptych.errors import RETRY_LATER_S, WorkerDrainingError


class OpenCalls:
    """Owns which calls are being answered, and the count of those that are not over.

    Event loop only. Invariant: a call counts until gRPC has sent its status, or its client left.
    """

    def __init__(self) -> None:
        self._answering: set[asyncio.Task[object]] = set()
        self._num_open = 0
        self._none_open = asyncio.Event()
        self._none_open.set()
        self._why_ended: str | None = None  # all that are being answered, and all that come

    @contextmanager
    def answering(self, context: "grpc.aio.ServicerContext[Any, Any]") -> Iterator[None]:
        """One, by the task that calls. Raises WorkerDrainingError: they were all ended."""
        self._open(context)
        if self._why_ended is not None:
            raise WorkerDrainingError(self._why_ended, retry_after_s=RETRY_LATER_S)
        task = asyncio.current_task()
        assert task is not None, "a handler is a task"
        self._answering.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if self._why_ended is None or task.uncancel():  # its client left: nobody is to be told
                raise
            raise WorkerDrainingError(self._why_ended, retry_after_s=RETRY_LATER_S) from None
        finally:
            self._answering.discard(task)

    async def end(self, why: str, patience_s: float) -> None:
        """What is still being answered fails with ``why``; wait until all that was said is sent."""
        self._why_ended = why
        for task in self._answering:
            task.cancel()
        await self.wait_over(patience_s)

    async def wait_over(self, patience_s: float) -> None:
        """Until none is open, or ``patience_s`` at the most, as clients may take nothing."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._none_open.wait()

    def _open(self, context: Any) -> None:
        self._num_open += 1
        self._none_open.clear()
        context.add_done_callback(self._over)  # which the stubs give another kind of function

    def _over(self, _: object) -> None:
        self._num_open -= 1
        if self._num_open == 0:
            self._none_open.set()
