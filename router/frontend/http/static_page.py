"""The web page: files of this package that are served as they are, to anybody.

They hold nothing of this router. What the page shows it asks the API for, with the key that
its reader has typed.
"""

import hashlib
from importlib.resources import files
from typing import Final, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# Scripts and styles of this origin alone, and nothing that turns a text into HTML.
_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS: Final = {
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",  # a newer router's page is seen at once
}


class _File(NamedTuple):
    body: bytes
    kind: str
    tag: str


def _read() -> dict[str, _File]:
    """The files by the paths that they are served at."""
    found = {}
    for each in files(__package__).joinpath("page").iterdir():
        kind = _TYPES.get(each.name.rpartition(".")[2])
        if kind is not None:
            body = each.read_bytes()
            path = "/" if each.name == "index.html" else f"/page/{each.name}"
            found[path] = _File(body, kind, f'"{hashlib.sha256(body).hexdigest()[:32]}"')
    return found


_FILES: Final = _read()
PAGE_PATHS: Final = frozenset(_FILES)


async def answer_page(request: Request) -> Response:
    """The file of that path, or that the browser has it already."""
    found = _FILES[request.url.path]
    headers = {**_HEADERS, "etag": found.tag}
    if request.headers.get("if-none-match") == found.tag:
        return Response(status_code=304, headers=headers)
    return Response(found.body, headers={**headers, "content-type": found.kind})
