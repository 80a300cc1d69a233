"""A route that takes a JSON body: reads it, answers it, and stops when the client leaves."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from diptych.errors import RETRY_LATER_S, DiptychError, WorkerDrainingError
from router.frontend.http.errors import RefusedError
from router.frontend.http.exchange import BodyRoom, ClientGoneError, Exchange

logger = logging.getLogger(__name__)

Answer = Callable[[Exchange, bytes], Awaitable[None]]
"""Answers one request; what it raises becomes the client's error."""


Record = Callable[[Exchange, DiptychError | RefusedError], None]
"""Told of each request that was refused before its body was read."""


def unrecorded(exchange: Exchange, error: DiptychError | RefusedError) -> None:
    """For routes whose requests leave no record."""


@dataclass(frozen=True, slots=True)
class Posted:
    """An ASGI application, one task per request.

    The client is listened to for as long as its answer is made, so that one who leaves
    ends the work at once, whether the answer is a stream or not. One whose answer the
    server cuts off is told so.
    """

    answer: Answer
    room: BodyRoom
    record: Record = unrecorded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        exchange = Exchange(scope, receive, send, self.room.patience_s)
        try:
            await self._respond(exchange)
        except asyncio.CancelledError:  # by the server, whose time to drain is over
            error = WorkerDrainingError("the router shuts down", retry_after_s=RETRY_LATER_S)
            await self._fail(exchange, error)
            raise

    async def _respond(self, exchange: Exchange) -> None:
        try:
            exchange.take_request_id()
            data = await exchange.read_json_bytes(self.room)
        except ClientGoneError:
            return
        except (DiptychError, RefusedError) as error:
            self.record(exchange, error)
            await self._fail(exchange, error)
            return
        try:
            await self._answer_while_heard(exchange, data)
        except Exception:
            logger.exception("response crashed", extra={"request": exchange.request_id})

    async def _answer_while_heard(self, exchange: Exchange, data: bytes) -> None:
        async with asyncio.TaskGroup() as tasks:
            working = tasks.create_task(self._work(exchange, data), name="http-answer")
            listening = tasks.create_task(exchange.gone(), name="http-client")
            await asyncio.wait((working, listening), return_when=asyncio.FIRST_COMPLETED)
            working.cancel()
            listening.cancel()

    async def _work(self, exchange: Exchange, data: bytes) -> None:
        try:
            await self.answer(exchange, data)
        except asyncio.CancelledError as error:  # the task keeps it, and its frames know the task:
            raise error.with_traceback(None) from None  # else only the collector frees the answer
        except Exception as error:  # noqa: BLE001 - the boundary between requests
            if not exchange.leave_if_cut():
                await self._fail(exchange, error)
        else:
            exchange.leave_if_cut()

    async def _fail(self, exchange: Exchange, error: Exception) -> None:
        """Tell the client, unless it takes nothing."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.room.patience_s):
                await exchange.fail(error)
