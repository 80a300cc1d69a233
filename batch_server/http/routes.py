"""Which path is answered by what: the ASGI application."""

import http
import logging

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
from router.frontend.http.errors import RefusedError, answer_to, bug
from router.frontend.http.exchange import REQUEST_ID, BodyRoom, Exchange
from router.frontend.http.identified import Identified
from router.frontend.http.posted import Posted
from router.frontend.http.service import refusal

logger = logging.getLogger(__name__)


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
            HTTPException: _unknown,
            ClientDisconnect: _left,
            Exception: _crashed,
        },
    )
    return Identified(Authenticated(app, callers, _ignore))


def _ignore(path: str, exchange: Exchange, error: InvalidApiKeyError) -> None:
    """Who is not known leaves no record."""


async def _health(request: Request) -> Response:
    """It answers, so it lives."""
    return JSONResponse({"status": "ok"})


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, DiptychError | RefusedError)
    return refusal(answer_to(error))


async def _unknown(request: Request, error: Exception) -> Response:
    """No such path, or another method."""
    assert isinstance(error, HTTPException)
    phrase = http.HTTPStatus(error.status_code).phrase
    message = f"{request.method} {request.url.path}: {phrase}"
    code = phrase.lower().replace(" ", "_")
    response = refusal(answer_to(RefusedError(error.status_code, message, code)))
    response.headers.update(error.headers or {})
    return response


async def _left(request: Request, error: Exception) -> Response:
    """Nobody reads the answer."""
    return Response(status_code=400)


async def _crashed(request: Request, error: Exception) -> Response:
    request_id: str = request.scope[REQUEST_ID]
    logger.error("response crashed", exc_info=error, extra={"request": request_id})
    return refusal(bug(request_id))
