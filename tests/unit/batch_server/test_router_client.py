"""What becomes of connections to routers when their authority is replaced."""

import os
import ssl
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from batch_server.config import BatchServerConfig
from batch_server.router_client import RouterFiles, router_client
from router.frontend.callers.watched_file import WatchedFile


class Pool(httpx.AsyncBaseTransport):
    """Answers with what comes in two pieces; ``pools`` has all that were opened."""

    pools: list["Pool"]

    def __init__(self, **settings: object) -> None:
        self.is_closed = False
        self.pools.append(self)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/away":
            raise httpx.ConnectError("refused")
        return httpx.Response(200, content=self._pieces())

    async def _pieces(self) -> AsyncIterator[bytes]:
        yield b"all "
        assert not self.is_closed
        yield b"of it"

    async def aclose(self) -> None:
        self.is_closed = True


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[Pool]:
    opened: list[Pool] = []
    monkeypatch.setattr(Pool, "pools", opened, raising=False)
    monkeypatch.setattr("httpx.AsyncHTTPTransport", Pool)
    return opened


async def test_connections_under_an_older_authority_end_with_the_last_answer_over_them(
    tmp_path: Path, pools: list[Pool]
) -> None:
    path = tmp_path / "ca.pem"
    path.touch()
    files = RouterFiles(BatchServerConfig())
    files.ca = WatchedFile("router-ca", path, lambda _: ssl.create_default_context(), what="ca")

    async def change(second: int) -> None:
        os.utime(path, (second, second))
        assert files.ca is not None
        await files.ca.look()

    def closed() -> list[bool]:
        return [pool.is_closed for pool in pools]

    async with router_client(files, max_connections=4) as client:
        async with client.stream("GET", "http://r/") as answer:
            await change(1)
            with suppress(httpx.ConnectError):
                await client.get("http://r/away")
            assert closed() == [False, False]
            assert await answer.aread() == b"all of it"
        await client.get("http://r/")
        assert closed() == [True, False]
        for second in range(2, 10):
            await change(second)
            assert (await client.get("http://r/")).content == b"all of it"
            assert closed().count(False) == 1
    assert all(closed())
