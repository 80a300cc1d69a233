"""The Batches service by real gRPC: the same batches as over HTTP, and each tenant its own."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from batch_server.app import serve
from batch_server.config import BatchServerConfig
from diptych.api_keys import digest
from diptych.client import BatchClient, BatchState, BlockingBatchClient
from diptych.errors import (
    BatchNotOpenError,
    InvalidApiKeyError,
    InvalidRequestError,
    NotFoundError,
    QueueFullError,
    SlowClientError,
    WorkerDrainingError,
)
from diptych.rpc.channel import open_channel
from diptych.timers import Timers
from diptych.v1 import batches_pb2 as public
from diptych.v1 import batches_pb2_grpc
from router.frontend.callers.choice import callers_of
from tests.integration.batch_rig import (
    KEYS,
    UPLOADS,
    aio,
    content,
    drained,
    ended,
    refused,
    sent,
    served,
    upload_refused,
    written,
)
from tests.unit.batch_server.rig import CHAT, FakeRouters, line, texts
from tests.waiting import until


async def test_what_is_submitted_by_grpc_is_answered_and_the_same_over_http(tmp_path: Path) -> None:
    path = written(tmp_path, b"".join(line(f"line-{n}", f"text {n}") for n in range(40)))
    async with served(tmp_path) as at, at.client() as client:
        made = await client.submit(path, CHAT, "2h", {"of": "a test"})
        state = await ended(client, made.batch_id)
        assert (state.status, state.num_lines, state.num_completed) == ("completed", 40, 40)
        assert state.error_file_id is None
        output = await content(client, state.output_file_id)
        assert output == (await at.http.get(f"/v1/files/{state.output_file_id}/content")).content
        assert list(texts(await at.rig.content(state.output_file_id))) == [
            f"line-{n}" for n in range(40)
        ]
        told = (await at.http.get(f"/v1/batches/{made.batch_id}")).json()
        found = (await at.stub.GetBatch(public.GetBatchRequest(id=made.batch_id))).batch
        assert await client.batches() == [await client.state(made.batch_id)] == [state]
    assert told["metadata"] == dict(found.metadata) == {"of": "a test"}
    assert (told["completion_window"], found.completion_window) == ("2h", "2h")
    assert (told["created_at"], told["expires_at"]) == (found.created_s, found.expires_s)
    moved = {public.BatchStatus.Name(each.status): each.at_s for each in found.moves}
    assert moved == {
        f"BATCH_STATUS_{status.upper()}": told[f"{status}_at"]
        for status in ("in_progress", "finalizing", "completed")
    }


async def test_code_without_an_event_loop_has_the_same_client(tmp_path: Path) -> None:
    path = written(tmp_path, line("a", "one") + line("b", "two"))

    def work(address: str) -> list[str]:
        with BlockingBatchClient(address, retries=0) as client:
            stored = client.upload(path)
            made = client.create(stored, CHAT, "2h", {"of": "a test"})
            *_, state = client.watch(made.batch_id)
            assert (state.status, state.num_completed) == ("completed", 2)
            assert client.batches() == [client.state(made.batch_id)] == [state]
            assert state.output_file_id is not None
            for _ in client.content(state.output_file_id):
                break  # whoever has enough leaves
            answered = b"".join(client.content(state.output_file_id))
            client.delete(stored)
            with pytest.raises(NotFoundError):
                next(client.content(stored))
            with pytest.raises(BatchNotOpenError):
                client.cancel(made.batch_id)
            assert client.submit(path, CHAT).num_failed == 0
        return list(texts([json.loads(each) for each in answered.splitlines()]))

    async with served(tmp_path) as at:
        assert await asyncio.to_thread(work, at.address) == ["a", "b"]


@pytest.mark.parametrize(
    ("data", "code", "number"),
    [
        (line("a", "x") + b"no json\n", "invalid_json_line", 2),
        (line("a", "x") + line("b", "x" * 3_000), "line_too_long", 2),
    ],
)
async def test_a_line_that_is_wrong_is_an_error_of_the_batch(
    tmp_path: Path, data: bytes, code: str, number: int
) -> None:
    async with served(tmp_path) as at, at.client() as client:
        made = await client.submit(written(tmp_path, data), CHAT)
        assert (await ended(client, made.batch_id)).status == "failed"
        batch = (await at.stub.GetBatch(public.GetBatchRequest(id=made.batch_id))).batch
        told = (await at.http.get(f"/v1/batches/{made.batch_id}")).json()["errors"]["data"]
    (error,) = batch.errors
    assert (error.line, error.code) == (number, code)
    over_http = {"line": error.line, "code": code, "message": error.message, "param": None}
    assert told == [over_http]
    assert not batch.output_file_id


async def test_a_line_that_a_router_refuses_is_in_the_error_file(tmp_path: Path) -> None:
    def wrong(request: httpx.Request) -> httpx.Response:
        return httpx.Response(400, json={"error": {"message": "no", "param": "temperature"}})

    async with served(tmp_path, routers=FakeRouters(wrong)) as at, at.client() as client:
        made = await client.submit(written(tmp_path, line("a", "x")), CHAT)
        state = await ended(client, made.batch_id)
        assert (state.status, state.num_failed, state.output_file_id) == ("completed", 1, None)
        assert b'"temperature"' in await content(client, state.error_file_id)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"endpoint": "/v1/other"}, "endpoint"),
        ({"completion_window": "15d"}, "completion_window"),
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"input_file_id": "file\0"}, "input_file_id"),
        ({"metadata": {"": "x"}}, "metadata.[key]"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
    ],
)
async def test_batches_that_are_wrong(tmp_path: Path, changed: dict[str, Any], field: str) -> None:
    async with served(tmp_path) as at, at.client() as client:
        file_id = await client.upload(written(tmp_path, line("a", "x")))
        right = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "1h"}
        error = await refused(at.stub.CreateBatch(public.CreateBatchRequest(**right | changed)))
        assert isinstance(error, InvalidRequestError)
        assert error.field.startswith(field.partition(".")[0])
        over_http = await at.http.post("/v1/batches", json=right | changed)
        assert over_http.json()["error"]["param"] == error.field
        assert await client.batches() == []


async def test_what_is_not_there_is_not_found_and_ids_may_be_anything(tmp_path: Path) -> None:
    async with served(tmp_path) as at:
        for name in ("batch_none", "", "\0", "x" * 5000):
            calls = [
                at.stub.GetBatch(public.GetBatchRequest(id=name)),
                at.stub.CancelBatch(public.CancelBatchRequest(id=name)),
                at.stub.DeleteFile(public.DeleteFileRequest(id=name)),
                at.stub.WatchBatch(public.WatchBatchRequest(id=name)).read(),
                at.stub.ReadFile(public.ReadFileRequest(id=name)).read(),
            ]
            for call in calls:
                error = await refused(call)
                assert isinstance(error, NotFoundError)
                assert error.metadata["field"] == "id"
        for asked, field in (({"limit": 101}, "limit"), ({"after": "\0"}, "after")):
            error = await refused(at.stub.ListBatches(public.ListBatchesRequest(**asked)))
            assert isinstance(error, InvalidRequestError)
            assert error.field == field


async def test_lists_come_in_pages(tmp_path: Path) -> None:
    async with served(tmp_path) as at, at.client() as client:
        path = written(tmp_path, line("a", "x"))
        made = []
        for _ in range(3):
            made.append((await client.submit(path, CHAT)).batch_id)
            await ended(client, made[-1])
        page = await at.stub.ListBatches(public.ListBatchesRequest(limit=2))
        assert ([each.id for each in page.batches], page.has_more) == ([made[2], made[1]], True)
        page = await at.stub.ListBatches(public.ListBatchesRequest(limit=2, after=made[1]))
        assert ([each.id for each in page.batches], page.has_more) == ([made[0]], False)


async def test_a_batch_is_cancelled_and_one_that_has_ended_is_not(tmp_path: Path) -> None:
    asked = asyncio.Event()

    class Waiting(FakeRouters):
        async def __call__(self, request: httpx.Request) -> httpx.Response:
            if len(self.asked) >= 2:
                asked.set()
                await asyncio.Event().wait()
            return await super().__call__(request)

    path = written(tmp_path, b"".join(line(str(n), f"text {n}") for n in range(10)))
    async with served(tmp_path, routers=Waiting()) as at, at.client() as client:
        made = await client.submit(path, CHAT)
        await asked.wait()
        await client.cancel(made.batch_id)
        state = await ended(client, made.batch_id)
        assert (state.status, state.num_completed, state.num_failed) == ("cancelled", 2, 8)
        errors = await content(client, state.error_file_id)
        assert errors.count(b"batch_cancelled") == 8
        assert (await client.cancel(made.batch_id)).status == "cancelled"
    path = written(tmp_path, b"no json")
    async with served(tmp_path) as at, at.client() as client:
        made = await client.submit(path, CHAT)
        await ended(client, made.batch_id)
        with pytest.raises(BatchNotOpenError, match="failed"):
            await client.cancel(made.batch_id)


async def test_a_watch_tells_each_change_and_ends(tmp_path: Path) -> None:
    go_on = [asyncio.Event() for _ in range(3)]
    turns = iter(go_on)

    class Stepped(FakeRouters):
        async def __call__(self, request: httpx.Request) -> httpx.Response:
            await next(turns).wait()
            return await super().__call__(request)

    path = written(tmp_path, b"".join(line(str(n), f"text {n}") for n in range(3)))
    async with served(tmp_path, routers=Stepped()) as at, at.client() as client:
        made = await client.submit(path, CHAT)
        seen: list[BatchState] = []
        async with asyncio.timeout(30):
            async for state in client.watch(made.batch_id):
                seen.append(state)
                if state.status == "in_progress":
                    go_on[state.num_completed].set()
    assert [s.num_completed for s in seen if s.status == "in_progress"] == [0, 1, 2]
    assert seen[-1].status == "completed"
    assert len(set(seen)) == len(seen)


async def test_watches_are_bounded_and_end_with_the_server(tmp_path: Path) -> None:
    class Silent(FakeRouters):
        async def __call__(self, request: httpx.Request) -> httpx.Response:
            await asyncio.Event().wait()
            raise AssertionError

    path = written(tmp_path, line("a", "x"))
    async with served(tmp_path, routers=Silent()) as at, at.client() as client:
        made = await client.submit(path, CHAT)
        request = public.WatchBatchRequest(id=made.batch_id)
        watches: list[Any] = []
        for _ in range(16):
            watches.append(at.stub.WatchBatch(request))
            await watches[-1].read()
        assert isinstance(await refused(at.stub.WatchBatch(request).read()), QueueFullError)
        watches.pop().cancel()
        await until(lambda: at.batches._watching._taken.total() == 15, 10, "a watch ends")
        await at.stub.WatchBatch(request).read()
        at.batches.end()
        for watch in watches:
            error = await refused(drained(watch))
            assert isinstance(error, WorkerDrainingError)


async def test_an_upload_that_outlasts_the_drain_is_told_so(tmp_path: Path) -> None:
    config = BatchServerConfig(
        listen="127.0.0.1:0",
        http_port=0,
        database=f"sqlite:///{tmp_path / 'batches.db'}",
        timers=Timers(drain_s=0.1),
    )
    stop, port = asyncio.Event(), asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(serve(config, stop, port.set_result))
        async with open_channel(f"127.0.0.1:{await port}") as channel:
            stub: Any = batches_pb2_grpc.BatchesStub(channel)
            upload = stub.UploadFile()
            for message in sent(public.NewFile(num_bytes=10), b"x" * 9):
                await upload.write(message)
            await stub.ListBatches(public.ListBatchesRequest())  # so the other call is there
            stop.set()
            assert isinstance(await upload_refused(upload), WorkerDrainingError)


async def test_who_takes_nothing_is_given_up(tmp_path: Path) -> None:
    """Beyond what is on its way, which gRPC holds for it."""
    uploads = UPLOADS._replace(max_file_bytes=20_000_000, max_tenant_bytes=20_000_000)
    async with served(tmp_path, uploads=uploads, write_s=0.5) as at:
        file = public.NewFile(num_bytes=20_000_000)
        data = [b"x" * 500_000] * 40
        stored = (await at.stub.UploadFile(iter(sent(file, *data)))).file
        call = at.stub.ReadFile(public.ReadFileRequest(id=stored.id))
        assert await call.read() is not aio.EOF
        await asyncio.sleep(1.5)
        error = await refused(drained(call))
        assert isinstance(error, SlowClientError)


async def test_a_tenant_reads_so_many_files_at_a_time(tmp_path: Path) -> None:
    uploads = UPLOADS._replace(max_file_bytes=20_000_000, max_tenant_bytes=20_000_000)
    async with served(tmp_path, uploads=uploads) as at:
        file = public.NewFile(num_bytes=20_000_000)
        stored = (await at.stub.UploadFile(iter(sent(file, *[b"x" * 500_000] * 40)))).file
        request = public.ReadFileRequest(id=stored.id)
        reads: list[Any] = []
        for _ in range(4):
            reads.append(at.stub.ReadFile(request))
            await reads[-1].read()
        error = await refused(at.stub.ReadFile(request).read())
        assert isinstance(error, QueueFullError)
        assert error.retry_after_s
        reads.pop().cancel()
        await until(lambda: at.files._reading._taken.total() == 3, 10, "a reader's place is free")
        reads.append(at.stub.ReadFile(request))
        await reads[-1].read()
        for read in reads:
            read.cancel()
        await until(lambda: at.files._reading._taken.total() == 0, 10, "all places are free")


async def test_a_tenant_sees_its_own_alone(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{tenant} {digest(key)}\n" for key, tenant in KEYS.items()))
    callers = callers_of(keys, BatchServerConfig().jwt)
    path = written(tmp_path, line("a", "x"))
    async with (
        served(tmp_path, callers=callers) as at,
        at.client("one") as own,
        at.client("two") as other,
        at.client("none") as unknown,
        at.client() as keyless,
    ):
        made = await own.submit(path, CHAT)
        state = await ended(own, made.batch_id)
        assert state.output_file_id is not None
        input_id = (await at.rig.batches.get(made.batch_id)).input_file_id  # type: ignore[union-attr]
        questions: list[Callable[[BatchClient], Any]] = [
            lambda client: client.state(made.batch_id),
            lambda client: client.cancel(made.batch_id),
            lambda client: ended(client, made.batch_id),
            lambda client: content(client, state.output_file_id),
            lambda client: content(client, input_id),
            lambda client: client.delete(input_id),
        ]
        for ask in questions:
            with pytest.raises(NotFoundError):
                await ask(other)
        with pytest.raises(InvalidRequestError, match="input_file_id"):
            await other.create(input_id, CHAT)
        assert await other.batches() == []
        assert len(await own.batches()) == 1
        for client in (unknown, keyless):
            for ask in questions:
                with pytest.raises(InvalidApiKeyError):
                    await ask(client)
            with pytest.raises(InvalidApiKeyError):
                await client.upload(path)
