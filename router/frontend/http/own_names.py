"""A server that only its own machine reaches, kept from pages of elsewhere in a browser there.

Such a page reads no answer of another origin. But its owner may have its own name lead to this
machine once it is open, and what answers then is of its origin (DNS rebinding). Browsers tell by
which name they ask.
"""

from ipaddress import ip_address
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from router.frontend.callers.callers import Anybody, Callers
from router.frontend.http.errors import RefusedError, answer_to
from router.frontend.http.identified import Identified
from router.frontend.http.refusals import refusal

_OF_NOBODY: Final = frozenset({"localhost", "local", "internal"})  # what no public name ends with
_REFUSED: Final = RefusedError(
    421,
    "this server has no keys and listens on its own machine alone, where it is asked for by an "
    "address, localhost or another name that is not public (a proxy has to send such a Host)",
    "host_not_allowed",
)


class OwnNames:
    """An ASGI application that refuses in another's place who asks by a public name."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        app = self._app
        if is_public(Headers(scope=scope).get("host", "")):
            app = Identified(refusal(answer_to(_REFUSED)))
        await app(scope, receive, send)


def by_own_names(app: ASGIApp, host: str, callers: Callers) -> ASGIApp:
    """The application as it is served on ``host``.

    Where keys are asked for no page has one; what others reach has names that nobody here knows.
    """
    is_open = isinstance(callers, Anybody)
    return OwnNames(app) if is_open and _is_of_this_machine(host) else app


def is_public(host: str) -> bool:
    """Whether a ``Host`` is a name that somebody may own, rather than an address, or a name that
    only machines and networks give themselves."""
    if host.startswith("["):
        return False
    name = host.partition(":")[0].rstrip(".")
    rest, _, end = name.rpartition(".")
    return bool(rest) and not end.isdigit() and end.lower() not in _OF_NOBODY


def _is_of_this_machine(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
