"""Answers that no route of ours writes have an id as well."""

import json
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from diptych.errors import InvalidApiKeyError
from diptych.tenant import Tenant
from router.frontend.http.authenticated import Authenticated
from router.frontend.http.exchange import Exchange
from router.frontend.http.identified import Identified
from router.frontend.http.routes import make_app
from router.frontend.http.service import ServiceAnswers


class Strangers:
    """Callers of whom none is known."""

    async def tenant(self, authorization: str | None) -> Tenant:
        raise InvalidApiKeyError("who")

    async def run(self) -> None: ...


class Friends(Strangers):
    """Callers of whom all are known."""

    async def tenant(self, authorization: str | None) -> Tenant:
        return Tenant("alice")


class CrashError(Exception):
    """A bug."""


def crash() -> bool:
    raise CrashError


async def nowhere(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("let in")


async def answered(app: ASGIApp, given: list[bytes]) -> dict[bytes, bytes]:
    """The headers of the answer to a request with these ids."""
    return dict((await sent_by(Identified(app), given))[0]["headers"])


async def sent_by(app: ASGIApp, given: list[bytes], path: str = "/v1/models") -> list[Any]:
    """The messages of the answer, of one that crashed too."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("read")

    headers = [(b"x-request-id", id) for id in given]
    scope = {"type": "http", "method": "GET", "path": path, "headers": headers}
    with suppress(CrashError):
        await app(scope, receive, send)
    return sent


@pytest.mark.parametrize("given", [[], [b""], [b"a b"], [b"x" * 129]])
async def test_who_gives_no_good_id_gets_one(given: list[bytes]) -> None:
    headers = await answered(PlainTextResponse("ok"), given)
    assert len(headers[b"x-request-id"]) == 32


async def test_a_clients_id_comes_back() -> None:
    assert (await answered(PlainTextResponse("ok"), [b"mine"]))[b"x-request-id"] == b"mine"


@pytest.mark.parametrize("given", ["ü-À-界".encode(), "ü".encode("latin-1")])
async def test_an_id_that_is_no_ascii_comes_back_as_it_came(given: bytes) -> None:
    assert (await answered(PlainTextResponse("ok"), [given]))[b"x-request-id"] == given


async def test_an_answers_own_id_stays() -> None:
    own = PlainTextResponse("ok", headers={"x-request-id": "own"})
    assert (await answered(own, [b"mine"]))[b"x-request-id"] == b"own"


@pytest.mark.parametrize("given", [[], [b"a b"], [b"mine"]])
async def test_who_is_refused_by_its_key_is_told_the_id_of_the_record(given: list[bytes]) -> None:
    recorded: list[str] = []

    def record(path: str, exchange: Exchange, error: InvalidApiKeyError) -> None:
        recorded.append(exchange.request_id)

    headers = await answered(Authenticated(nowhere, Strangers(), record), given)
    assert [headers[b"x-request-id"].decode()] == recorded


@pytest.mark.parametrize("given", [[], [b"mine"]])
async def test_who_meets_a_bug_is_told_the_id_that_was_logged(
    given: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    some: Any = SimpleNamespace()
    service = ServiceAnswers(some, None, crash, some)
    app = make_app(some, some, some, service, some, Friends())
    head, body = await sent_by(app, given, "/health")
    request_id = dict(head["headers"])[b"x-request-id"].decode()
    told = json.loads(body["body"])["error"]["message"]
    assert told == f"internal error in request {request_id}"
    assert [getattr(record, "request", None) for record in caplog.records] == [request_id]
