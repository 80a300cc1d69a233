"""What a request's path, query and origin say. Pure."""

from collections.abc import Mapping
from typing import NamedTuple

from diptych.errors import InvalidRequestError
from router.frontend.http.errors import RefusedError

MOST_AT_ONCE = 1000
_MOST_DIGITS = 9


class PageAsked(NamedTuple):
    """Which part of a list a client wants."""

    limit: int
    after: str | None


def read_page(query: Mapping[str, str], default: int, most: int) -> PageAsked:
    """Up to ``most`` may be asked for, MOST_AT_ONCE come. Raises InvalidRequestError."""
    given = query.get("limit", str(default))
    is_number = given.isascii() and given.isdigit() and len(given) <= _MOST_DIGITS
    if not (is_number and 0 < int(given) <= most):
        raise InvalidRequestError(f"should be a number from 1 to {most}", field="limit")
    return PageAsked(min(int(given), MOST_AT_ONCE), read_word(query, "after"))


def read_word(query: Mapping[str, str], name: str) -> str | None:
    """Something to look for in the database, which takes no zero byte.

    Raises InvalidRequestError.
    """
    given = query.get(name)
    if given is not None and not given.isprintable():
        raise InvalidRequestError("has characters that cannot be printed", field=name)
    return given


def path_id(given: str, kind: str) -> str:
    """The id in a path. Raises RefusedError: there can be none of that id."""
    if not given.isprintable():
        raise not_found(kind, given)
    return given


def read_ascending(query: Mapping[str, str]) -> bool:
    """Whether the oldest come first. Raises InvalidRequestError."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequestError("should be asc or desc", field="order")
    return order == "asc"


def refuse_browsers(headers: Mapping[str, str]) -> None:
    """A page from elsewhere may post forms unasked, and would store files here.

    Raises RefusedError.
    """
    if "origin" in headers:
        raise RefusedError(403, "nothing is taken from a browser's page", "origin_not_allowed")


def not_found(kind: str, given: str) -> RefusedError:
    """There is none, or it is another tenant's, which nobody else learns."""
    return RefusedError(404, f"no {kind} {given[:128]!r} here", "not_found", param="id")
