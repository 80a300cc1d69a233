"""What a request's query, headers and scope say. Pure."""

from collections.abc import Mapping

from starlette.requests import Request

from diptych.errors import InvalidRequestError
from router.frontend.http.errors import RefusedError
from router.frontend.http.exchange import TENANT

_MOST_DIGITS = 9


def read_limit(query: Mapping[str, str], default: int) -> int | None:
    """How many of a list are wanted; None: it is no number."""
    given = query.get("limit", str(default))
    is_number = given.isascii() and given.isdigit() and len(given) <= _MOST_DIGITS
    return int(given) if is_number else None


def read_ascending(query: Mapping[str, str]) -> bool:
    """Whether the oldest come first. Raises InvalidRequestError."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequestError("should be asc or desc", field="order")
    return order == "asc"


def tenant_of(request: Request) -> str:
    """Whose request it is."""
    name: str = request.scope[TENANT].name
    return name


def refuse_browsers(headers: Mapping[str, str]) -> None:
    """A page from elsewhere may post forms unasked, and would store files here.

    Raises RefusedError.
    """
    if "origin" in headers:
        raise RefusedError(403, "nothing is taken from a browser's page", "origin_not_allowed")
