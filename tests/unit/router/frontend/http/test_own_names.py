"""By which names a server of one machine is asked."""

import httpx
import pytest
from starlette.responses import PlainTextResponse

from router.frontend.callers.callers import Anybody, Callers, KnownCallers
from router.frontend.http.own_names import by_own_names, is_public


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *[(name, True) for name in ("evil.example", "evil.example:8000", "Evil.Example.", "a.b")],
        *[(name, True) for name in ("127.0.0.1.nip.io", "localhost.evil.example", "a.local.b")],
        *[(name, False) for name in ("127.0.0.1", "127.0.0.1:8000", "127.1", "10.0.0.7:80")],
        *[(name, False) for name in ("[::1]", "[::1]:8000", "localhost", "localhost:8000")],
        *[(name, False) for name in ("LOCALHOST.", "demo.localhost:1", "printer.local", "router")],
        *[(name, False) for name in ("host.docker.internal:8000", "", ":8000", ".")],
    ],
)
def test_public_names_are_told_from_others(host: str, expected: bool) -> None:
    assert is_public(host) is expected


async def status(host: str, callers: Callers, asked_as: str) -> int:
    app = by_own_names(PlainTextResponse("here"), host, callers)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://a") as client:
        answer = await client.get("/", headers={"host": asked_as, "x-request-id": "mine"})
    if answer.status_code != 200:
        assert answer.json()["error"]["code"] == "host_not_allowed"
        assert answer.headers["x-request-id"] == "mine"
    return answer.status_code


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1", "localhost"])
async def test_a_page_whose_name_was_made_to_lead_here_reads_nothing(host: str) -> None:
    assert await status(host, Anybody(), "evil.example:8000") == 421
    assert await status(host, Anybody(), "localhost:8000") == 200
    assert await status(host, KnownCallers(None), "evil.example:8000") == 200


async def test_what_others_reach_may_have_any_name() -> None:
    for host in ("0.0.0.0", "::", "10.0.0.7", "router.example"):
        assert await status(host, Anybody(), "llm.example") == 200
