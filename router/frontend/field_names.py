"""The fields of a request as its front end calls them. Pure."""

from collections.abc import Mapping

from diptych.errors import InvalidRequestError


def renamed(error: InvalidRequestError, names: Mapping[str, str]) -> InvalidRequestError:
    """The error with its field as the client wrote it.

    ``names`` maps the begin of a field's path in a GenerationRequest to what it is in
    the client's own message; the first that fits counts.
    """
    for ours, theirs in names.items():
        rest = error.field.removeprefix(ours)
        if error.field.startswith(ours) and (ours.endswith(".") or rest[:1] in ("", ".", "[")):
            message = error.message.removeprefix(f"{error.field}: ")
            return InvalidRequestError(message, field=theirs + rest)
    return error
