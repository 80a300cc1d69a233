"""Errors as responses of Starlette's."""

import http
import logging

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from router.frontend.http.errors import ErrorAnswer, RefusedError, answer_to, bug
from router.frontend.http.exchange import REQUEST_ID

logger = logging.getLogger(__name__)


def refusal(answer: ErrorAnswer) -> Response:
    """An error as a response."""
    headers = {} if answer.retry_after_s is None else {"retry-after": str(answer.retry_after_s)}
    return JSONResponse(answer.content, answer.status, headers)


async def unknown(request: Request, error: Exception) -> Response:
    """No such path, or another method."""
    assert isinstance(error, HTTPException)
    phrase = http.HTTPStatus(error.status_code).phrase
    message = f"{request.method} {request.url.path}: {phrase}"
    code = phrase.lower().replace(" ", "_")
    response = refusal(answer_to(RefusedError(error.status_code, message, code)))
    response.headers.update(error.headers or {})
    return response


async def crashed(request: Request, error: Exception) -> Response:
    """A bug: clients learn the request's id, and the log the rest."""
    request_id: str = request.scope[REQUEST_ID]
    logger.error("response crashed", exc_info=error, extra={"request": request_id})
    return refusal(bug(request_id))
