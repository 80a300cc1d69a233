"""The batch server's ASGI application, and a client of it."""

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
from starlette.types import ASGIApp

from batch_server.desk.batches import BatchDesk
from batch_server.desk.files import FileDesk, UploadBounds
from batch_server.http.batches import MAX_BODY_BYTES, BatchAnswers
from batch_server.http.files import FileAnswers
from batch_server.http.routes import make_app
from batch_server.runner.runner import Runner
from batch_server.store.tenant_room import TenantBounds
from router.frontend.callers.callers import Anybody, Callers
from router.frontend.http.exchange import BodyRoom
from tests.unit.batch_server.rig import CHAT, Rig, line

DATA = line("a", "one")
BODY: dict[str, Any] = {"endpoint": CHAT, "completion_window": "24h"}
BOUNDS = UploadBounds(max_file_bytes=100_000, max_tenant_bytes=150_000, patience_s=30.0)


def app_of(
    rig: Rig, callers: Callers, bounds: UploadBounds, runner: Runner, clock: Callable[[], float]
) -> ASGIApp:
    tenants = TenantBounds(max_open=2, max_bytes=bounds.max_tenant_bytes)
    return make_app(
        FileAnswers(FileDesk(rig.files, bounds, clock), bounds.max_file_bytes, 30.0),
        BatchAnswers(BatchDesk(rig.batches, rig.files, runner, tenants, clock)),
        callers,
        BodyRoom(MAX_BODY_BYTES, 10 * MAX_BODY_BYTES, 5.0),
    )


@asynccontextmanager
async def asked(
    rig: Rig,
    callers: Callers | None = None,
    bounds: UploadBounds = BOUNDS,
    runner: Runner | None = None,
    *,
    raises: bool = True,
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application; batches go on where ``runner`` does.

    ``raises``: what crashes there does so here.

    Each request comes a second later.
    """
    seconds = itertools.count(1_000)

    def clock() -> float:
        return float(next(seconds))

    runner = runner or Runner(rig.needs)
    app = app_of(rig, callers or Anybody(), bounds, runner, clock)
    transport = httpx.ASGITransport(app, raise_app_exceptions=raises)
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        yield client


async def upload(
    client: httpx.AsyncClient, data: bytes = DATA, *, headers: dict[str, str] | None = None
) -> str:
    files = {"file": ("in.jsonl", data)}
    answer = await client.post("/v1/files", files=files, data={"purpose": "batch"}, headers=headers)
    assert answer.status_code == 200, answer.text
    made: str = answer.json()["id"]
    return made


def error_of(answer: httpx.Response) -> tuple[int, str, str | None]:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return answer.status_code, error["code"], error["param"]
