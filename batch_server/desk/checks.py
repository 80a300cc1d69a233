"""What the ids and pages that clients name may be. Pure."""

from typing import NamedTuple

from batch_server.records import FileKind, is_id
from diptych.errors import InvalidRequestError, NotFoundError

MOST_AT_ONCE = 1000


class PageAsked(NamedTuple):
    """Which part of a list a client wants."""

    limit: int
    after: str | None


def checked_page(limit: int | None, after: str | None, most: int, *, kind: FileKind) -> PageAsked:
    """Up to ``most`` may be asked for, MOST_AT_ONCE come; a limit of None is no number.

    ``after`` may be gone: so who deletes each that is listed gets to the end of the list.

    Raises InvalidRequestError.
    """
    if limit is None or not 0 < limit <= most:
        raise InvalidRequestError(f"should be a number from 1 to {most}", field="limit")
    if after is not None and not is_id(kind, after):
        raise InvalidRequestError(f"should be the id of a {kind}", field="after")
    return PageAsked(min(limit, MOST_AT_ONCE), after)


def checked_word(given: str | None, name: str) -> str | None:
    """Something to look for in the database, which takes no zero byte.

    Raises InvalidRequestError.
    """
    if given is not None and not given.isprintable():
        raise InvalidRequestError("has characters that cannot be printed", field=name)
    return given


def not_found(kind: str, given: str) -> NotFoundError:
    """There is none, or it is another tenant's, which nobody else learns."""
    return NotFoundError(f"no {kind} {given[:128]!r} here", field="id")
