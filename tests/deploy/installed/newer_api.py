"""The API that the chart is written for, in front of a server of Kubernetes 1.20, which lacks some.

Objects of versions that came later are stored as what 1.20 has in their place, and told anew as
what was sent: EndpointSlices and disruption budgets by the versions before theirs, probes by
gRPC as commands that the node knows. What has no such place is dropped. All else passes as is.
"""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import trustme
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from diptych.rpc.identity import Certificate
from diptych.timers import Timers
from router.frontend.http.server import HttpServer, bind, bounds_of
from router.untaken import Untaken

VERSION = "v1.29.0"
"""What it says it is: the oldest that the chart may be installed into."""

Json = Any  # of any API object
_OLDER = {
    "discovery.k8s.io/v1": "discovery.k8s.io/v1beta1",
    "policy/v1": "policy/v1beta1",
}
_NEWER = {older: newer for newer, older in _OLDER.items()}
_PROBE = "probe-by-grpc"
_ZONE = "topology.kubernetes.io/zone"
_JSON = "application/json"
_KEPT_HEADERS = ("authorization", "content-type", "user-agent")
_NO_SUCH_WATCH = {
    "kind": "Status",
    "apiVersion": "v1",
    "status": "Failure",
    "reason": "Invalid",
    "code": 422,
    "message": "sendInitialEvents is forbidden for watch unless the WatchList feature gate is on",
}
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
_PORT = 8001
_MAX_BODY_BYTES = 2**24


def stored(found: Json) -> Json:
    """What 1.20 keeps of an object that was sent."""
    return _walked(found, _stored)


def told(found: Json) -> Json:
    """What is told of an object that 1.20 keeps, a list of them, or what there are versions of."""
    return _walked(found, _told)


def _walked(found: Json, change: Callable[[dict[str, Json]], dict[str, Json]]) -> Json:
    """The same with ``change`` made to every mapping in it, the inner ones first."""
    if isinstance(found, dict):
        return change({key: _walked(value, change) for key, value in found.items()})
    if isinstance(found, list):
        return [_walked(each, change) for each in found]
    return found


def _stored(found: dict[str, Json]) -> dict[str, Json]:
    found.pop("unhealthyPodEvictionPolicy", None)  # of budgets: 1.20 knows one policy
    if isinstance(probe := found.pop("grpc", None), dict):
        command = [_PROBE, str(probe["port"]), probe.get("service", "")]
        return {**found, "exec": {"command": command}}
    return _renamed(found, _OLDER)


def _told(found: dict[str, Json]) -> dict[str, Json]:
    command = (found.get("exec") or {}).get("command") or []
    if command[:1] == [_PROBE]:
        del found["exec"]
        return {**found, "grpc": {"port": int(command[1]), "service": command[2]}}
    if isinstance(places := found.pop("topology", None), dict) and _ZONE in places:
        found["zone"] = places[_ZONE]
    if "versions" in found and f"{found.get('name')}/v1" in _OLDER:  # a group
        version = {"groupVersion": f"{found['name']}/v1", "version": "v1"}
        return {**found, "versions": [version], "preferredVersion": version}
    return _renamed(found, _NEWER)


def _renamed(found: dict[str, Json], names: Mapping[str, str]) -> dict[str, Json]:
    for key in ("apiVersion", "groupVersion"):
        if found.get(key) in names:
            found[key] = names[found[key]]
    return found


@asynccontextmanager
async def newer_api(url: str, folder: Path) -> AsyncIterator[str]:
    """Where it is served, in front of the server at ``url``.

    By TLS, as helm sends its token no other way.
    """
    api, timers = NewerApi(url), Timers()
    issued = trustme.CA().issue_cert("127.0.0.1")
    chain, key = folder / "newer.crt", folder / "newer.key"
    chain.write_bytes(issued.cert_chain_pems[0].bytes())
    key.write_bytes(issued.private_key_pem.bytes())
    app = Starlette(routes=[Route("/{path:path}", api.answer, methods=_METHODS)])
    bounds = bounds_of(_MAX_BODY_BYTES, timers.client_write_s)
    certificate = Certificate("newer-api", chain, key)
    untaken = Untaken(time.monotonic)
    server = HttpServer(app, bind("127.0.0.1", _PORT, timers), bounds, untaken, certificate)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve())
        try:
            yield f"https://127.0.0.1:{_PORT}"
        finally:
            await server.stop(patience_s=1)
            await api.close()


class NewerApi:
    """Passes requests on to a server of 1.20, whose certificate is its own and is not checked."""

    def __init__(self, url: str) -> None:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        self._http = httpx.AsyncClient(
            base_url=url, verify=context, timeout=httpx.Timeout(30.0, read=None), trust_env=False
        )

    async def answer(self, request: Request) -> Response:
        """One request; a watch is told line by line."""
        if request.url.path == "/version":
            return Response(json.dumps(_version()), media_type=_JSON)
        if "sendInitialEvents" in request.query_params:  # refused by the version that it says it is
            return Response(json.dumps(_NO_SUCH_WATCH), 422, media_type=_JSON)
        headers = {key: request.headers[key] for key in _KEPT_HEADERS if key in request.headers}
        is_schema = request.url.path.startswith("/openapi")
        headers["accept"] = request.headers.get("accept", "*/*") if is_schema else _JSON
        path = request.url.path
        for newer, older in _OLDER.items():
            if f"{path}/".startswith(f"/apis/{newer}/"):
                path = path.replace(newer, older, 1)
        body = await request.body()
        if body[:1] == b"{":
            body = json.dumps(stored(json.loads(body))).encode()
        asked = self._http.build_request(
            request.method, path, params=str(request.url.query), headers=headers, content=body
        )
        found = await self._http.send(asked, stream=True)
        kind = found.headers.get("content-type", "")
        if request.query_params.get("watch") in ("true", "1") and found.status_code == 200:
            return StreamingResponse(_lines(found), media_type=kind)
        content = await found.aread()
        await found.aclose()
        if kind.startswith(_JSON):
            content = json.dumps(told(json.loads(content))).encode()
        return Response(content, found.status_code, media_type=kind)

    async def close(self) -> None:
        """Ask nothing more."""
        await self._http.aclose()


async def _lines(found: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for line in found.aiter_lines():
            yield json.dumps(told(json.loads(line))).encode() + b"\n"
    except httpx.TransportError:
        return  # the server ended it
    finally:
        await found.aclose()


def _version() -> dict[str, str]:
    major, minor, _ = VERSION.removeprefix("v").split(".")
    return {"major": major, "minor": minor, "gitVersion": VERSION, "platform": "linux/amd64"}
