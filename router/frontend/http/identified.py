"""Every response has an id, so that a client can say which one it asks about."""

from contextlib import suppress

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diptych.errors import InvalidRequestError
from diptych.telemetry import logs
from router.frontend.http.exchange import REQUEST_ID, REQUEST_ID_HEADER, Exchange


class Identified:
    """An ASGI application that adds an id to what another answers without one.

    It is the client's own, if it sent a good one. Who answers finds it in the scope by
    ``REQUEST_ID``; what is logged meanwhile has it. Event loop only, a task for each request.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        exchange = Exchange(scope, receive, send)
        with suppress(InvalidRequestError):  # a route that takes one refuses it itself
            exchange.take_request_id()
        scope[REQUEST_ID] = exchange.request_id
        logs.mark(exchange.request_id)

        async def identify(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault(REQUEST_ID_HEADER, exchange.request_id_header)
            await send(message)

        await self._app(scope, receive, identify)
