"""Clients of a router that is about to end hear so with their answers, and connect elsewhere."""

from collections.abc import Callable

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.frontend.http.exchange import SEND


class Leaving:
    """An ASGI application that ends connections after another's answers, once it is time to.

    Nothing of an answer is lost. What streams may pass by it, and by all applications within,
    once an answer has begun: they add to its head alone. Event loop only.
    """

    def __init__(self, app: ASGIApp, is_serving: Callable[[], bool]) -> None:
        """``is_serving`` says whether clients should come here at all."""
        self._app = app
        self._is_serving = is_serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start" and not self._is_serving():
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        scope[SEND] = send
        await self._app(scope, receive, tell)
