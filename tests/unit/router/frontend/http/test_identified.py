"""Answers that no route of ours writes have an id as well."""

from typing import Any

import pytest
from starlette.responses import PlainTextResponse

from router.frontend.http.identified import Identified


async def answered(app: PlainTextResponse, given: list[bytes]) -> dict[bytes, bytes]:
    """The headers of the answer to a request with these ids."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("read")

    scope = {"type": "http", "method": "GET", "headers": [(b"x-request-id", id) for id in given]}
    await Identified(app)(scope, receive, send)
    return dict(sent[0]["headers"])


@pytest.mark.parametrize("given", [[], [b""], [b"a b"], [b"x" * 129]])
async def test_who_gives_no_good_id_gets_one(given: list[bytes]) -> None:
    headers = await answered(PlainTextResponse("ok"), given)
    assert len(headers[b"x-request-id"]) == 32


async def test_a_clients_id_comes_back() -> None:
    assert (await answered(PlainTextResponse("ok"), [b"mine"]))[b"x-request-id"] == b"mine"


async def test_an_answers_own_id_stays() -> None:
    answer = PlainTextResponse("ok", headers={"x-request-id": "own"})
    assert (await answered(answer, [b"mine"]))[b"x-request-id"] == b"own"
