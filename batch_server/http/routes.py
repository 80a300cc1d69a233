"""Which path is answered by what: the ASGI application."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from batch_server.http.batches import BatchAnswers
from batch_server.http.files import FileAnswers
from diptych.errors import DiptychError, InvalidApiKeyError
from router.frontend.callers.callers import Callers
from router.frontend.http.authenticated import Authenticated
from router.frontend.http.errors import RefusedError, answer_to
from router.frontend.http.exchange import BodyRoom, Exchange
from router.frontend.http.identified import Identified
from router.frontend.http.posted import Posted
from router.frontend.http.refusals import crashed, refusal, unknown


def make_app(
    files: FileAnswers, batches: BatchAnswers, callers: Callers, room: BodyRoom
) -> ASGIApp:
    """The application; ``room`` bounds the JSON bodies of all its requests together."""
    app = Starlette(
        routes=[
            Route("/v1/files", files.upload, methods=["POST"]),
            Route("/v1/files", files.list),
            Route("/v1/files/{file_id}", files.retrieve, methods=["GET"]),
            Route("/v1/files/{file_id}", files.delete, methods=["DELETE"]),
            Route("/v1/files/{file_id}/content", files.content),
            Route("/v1/batches", Posted(batches.create, room), methods=["POST"]),
            Route("/v1/batches", batches.list),
            Route("/v1/batches/{batch_id}", batches.retrieve),
            Route("/v1/batches/{batch_id}/cancel", batches.cancel, methods=["POST"]),
            Route("/health", _health),
        ],
        exception_handlers={
            DiptychError: _refused,
            RefusedError: _refused,
            HTTPException: unknown,
            ClientDisconnect: _left,
            Exception: crashed,
        },
    )
    app.router.redirect_slashes = False  # to http, behind a proxy that ends TLS: in the clear
    return Identified(Authenticated(app, callers, _ignore))


def _ignore(path: str, exchange: Exchange, error: InvalidApiKeyError) -> None:
    """Who is not known leaves no record."""


async def _health(request: Request) -> Response:
    """It answers, so it lives."""
    return JSONResponse({"status": "ok"})


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, DiptychError | RefusedError)
    return refusal(answer_to(error))


async def _left(request: Request, error: Exception) -> Response:
    """Nobody reads the answer."""
    return Response(status_code=400)
