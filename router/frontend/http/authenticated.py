"""Nothing is told to clients that are not known, but whether the router is well, and the page."""

from collections.abc import Callable
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from diptych.errors import InvalidApiKeyError
from router.frontend.callers.callers import Callers
from router.frontend.http.errors import answer_to
from router.frontend.http.exchange import TENANT, Exchange
from router.frontend.http.refusals import refusal
from router.frontend.http.static_page import PAGE_PATHS

_OPEN_PATHS: Final = frozenset({"/health"}) | PAGE_PATHS

Record = Callable[[str, Exchange, InvalidApiKeyError], None]


class Authenticated:
    """An ASGI application that answers with 401 in another's place, before a body is read.

    What it lets through has a tenant, which ``Exchange.tenant`` tells. Event loop only.
    """

    def __init__(self, app: ASGIApp, callers: Callers, record: Record) -> None:
        """``record`` is told of each refusal, by its path."""
        self._app, self._callers, self._record = app, callers, record

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["path"] in _OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        exchange = Exchange(scope, receive, send)
        try:
            given = exchange.headers.get("authorization")
            scope[TENANT] = await self._callers.tenant(given)
        except InvalidApiKeyError as error:
            self._record(scope["path"], exchange, error)
            response = refusal(answer_to(error))
            response.headers["www-authenticate"] = "Bearer"
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)
