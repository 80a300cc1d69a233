"""Asks an API server in plain JSON, as whoever a token names."""

import ssl
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import httpx

from tests.unit.deploy.chart import Manifest

_TIMEOUT_S = 30.0
_MERGE = "application/strategic-merge-patch+json"


class ApiClient:
    """One connection pool; an async context manager. Raises httpx.HTTPStatusError: refused."""

    def __init__(self, url: str, token: str) -> None:
        """The server signs its certificate itself, on this machine: it is not checked."""
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        headers = {"authorization": f"Bearer {token}"}
        self._http = httpx.AsyncClient(
            base_url=url, headers=headers, verify=context, timeout=_TIMEOUT_S, trust_env=False
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def get(self, path: str) -> Manifest:
        """One object, or a list of them."""
        return await self._send("GET", path, None)

    async def items(self, path: str) -> list[Manifest]:
        """All objects of a list."""
        return list((await self.get(path))["items"])

    async def post(self, path: str, body: Mapping[str, Any]) -> Manifest:
        """A new object, or what is asked of one."""
        return await self._send("POST", path, body)

    async def patch(self, path: str, body: Mapping[str, Any]) -> Manifest:
        """A part of an object is replaced."""
        return await self._send("PATCH", path, body)

    async def delete(self, path: str, body: Mapping[str, Any]) -> Manifest:
        """An object goes."""
        return await self._send("DELETE", path, body)

    async def is_ready(self) -> bool:
        """Whether the server is there and says that it serves."""
        try:
            return (await self._http.get("/readyz")).status_code == 200
        except httpx.TransportError:
            return False

    async def _send(self, method: str, path: str, body: Mapping[str, Any] | None) -> Manifest:
        headers = {"content-type": _MERGE} if method == "PATCH" else {}
        answer = await self._http.request(method, path, json=body, headers=headers)
        answer.raise_for_status()
        return dict(answer.json())
