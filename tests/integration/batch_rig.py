"""A Batches service of real gRPC, beside a real database, with routers that are a function."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from sqlalchemy import Connection, func, select

from batch_server.app import public_edge
from batch_server.config import BatchServerConfig
from batch_server.desk.batches import BatchDesk
from batch_server.desk.files import FileDesk, UploadBounds
from batch_server.http.batches import MAX_BODY_BYTES, BatchAnswers
from batch_server.http.files import FileAnswers
from batch_server.http.routes import make_app
from batch_server.rpc.servicer import BatchesServicer
from batch_server.runner.input_file import InputBounds
from batch_server.runner.runner import Runner
from batch_server.store.tables import CHUNKS, FILES
from batch_server.store.tenant_room import TenantBounds
from diptych.client import BatchClient, BatchState
from diptych.errors import (
    DiptychError,
)
from diptych.rpc.call_end import CallEnd
from diptych.rpc.channel import open_channel
from diptych.rpc.server import make_server
from diptych.rpc.status import from_rpc_error
from diptych.v1 import batches_pb2 as public
from diptych.v1 import batches_pb2_grpc
from router.frontend.callers.callers import Anybody, Callers
from router.frontend.http.exchange import BodyRoom
from tests.call_ends import told
from tests.unit.batch_server.rig import NOW_S, FakeRouters, Rig, opened

UPLOADS = UploadBounds(max_file_bytes=1_000_000, max_tenant_bytes=1_500_000, patience_s=30.0)
LINES = InputBounds(max_lines=100, max_line_bytes=2_000)
KEYS = {"one": "a", "two": "b"}
aio: Any = grpc.aio  # the stubs lack EOF


@dataclass
class Served:
    """A server, and ways to ask it."""

    rig: Rig
    address: str
    stub: Any
    files: FileDesk
    batches: BatchDesk
    http: httpx.AsyncClient

    def client(self, key: str = "") -> BatchClient:
        return BatchClient(self.address, api_key=key, retries=0)

    async def num_kept(self) -> int:
        """Rows of files, and of what is in them."""

        def count(connection: Connection) -> int:
            tables = (FILES, CHUNKS)
            return sum(
                int(connection.execute(select(func.count()).select_from(each)).scalar_one())
                for each in tables
            )

        return await self.rig.files._database.call(count)


@asynccontextmanager
async def served(
    folder: Path,
    *,
    callers: Callers | None = None,
    uploads: UploadBounds = UPLOADS,
    routers: FakeRouters | None = None,
    write_s: float = 30.0,
) -> AsyncIterator[Served]:
    """Batches are run. The clock goes on by a second with each question."""
    callers = callers or Anybody()
    seconds = itertools.count(int(NOW_S))

    def clock() -> float:
        return float(next(seconds))

    async with opened(folder, routers, bounds=LINES) as rig, asyncio.TaskGroup() as tasks:
        runner = Runner(rig.needs)
        running = tasks.create_task(runner.run(), name="runner")
        files = FileDesk(rig.files, uploads, clock)
        bounds = TenantBounds(max_open=2, max_bytes=uploads.max_tenant_bytes)
        batches = BatchDesk(rig.batches, rig.files, runner, bounds, clock)
        edge = public_edge(BatchServerConfig(), callers)
        server = make_server(public=edge)
        BatchesServicer(files, batches, callers, write_s=write_s).add_to(server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        app = make_app(
            FileAnswers(files, uploads.max_file_bytes, 30.0),
            BatchAnswers(batches),
            callers,
            BodyRoom(MAX_BODY_BYTES, 10 * MAX_BODY_BYTES, 5.0),
        )
        transport = httpx.ASGITransport(app)
        async with (
            httpx.AsyncClient(transport=transport, base_url="http://here") as http,
            open_channel(address) as channel,
        ):
            stub: Any = batches_pb2_grpc.BatchesStub(channel)
            try:
                yield Served(rig, address, stub, files, batches, http)
            finally:
                await server.stop(0)
                await files.wait_idle()
                running.cancel()


def written(folder: Path, data: bytes) -> Path:
    path = folder / "in.jsonl"
    path.write_bytes(data)
    return path


async def ended(client: BatchClient, batch_id: str) -> BatchState:
    async with asyncio.timeout(30):
        return [state async for state in client.watch(batch_id)][-1]


async def content(client: BatchClient, file_id: str | None) -> bytes:
    assert file_id is not None
    return b"".join([piece async for piece in client.content(file_id)])


def sent(*parts: public.NewFile | bytes) -> Iterable[public.UploadFileRequest]:
    return [
        public.UploadFileRequest(data=part)
        if isinstance(part, bytes)
        else public.UploadFileRequest(file=part)
        for part in parts
    ]


async def refused(call: Any) -> DiptychError:
    with pytest.raises(grpc.RpcError) as caught:
        await call
    return from_rpc_error(caught.value)


async def upload_refused(call: Any) -> DiptychError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with told(CallEnd(call)):
            await call
    return from_rpc_error(caught.value)


async def drained(call: Any) -> None:
    while await call.read() is not aio.EOF:
        pass
