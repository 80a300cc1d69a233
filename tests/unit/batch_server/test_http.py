"""What clients may ask of the batch server, through its ASGI application."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.types import Message

from batch_server.desk.files import FileDesk
from batch_server.http.batches import MAX_BODY_BYTES
from batch_server.http.files import FileAnswers
from batch_server.runner.batch_run import BatchRun
from batch_server.runner.runner import Runner
from batch_server.status import BatchStatus
from batch_server.store.files import FileStore
from diptych.api_keys import digest
from diptych.tenant import NOBODY
from router.frontend.callers.api_keys import ApiKeys
from router.frontend.callers.callers import Anybody, KnownCallers
from router.frontend.http.exchange import CONNECTION, TENANT
from tests.unit.batch_server.http_rig import (
    BODY,
    BOUNDS,
    DATA,
    app_of,
    asked,
    error_of,
    upload,
)
from tests.unit.batch_server.rig import INPUT, held_up, line, opened


async def test_a_file_comes_back_as_it_was(tmp_path: Path) -> None:
    data = bytes(range(256)) * 350
    async with opened(tmp_path) as rig, asked(rig) as client:
        file_id = await upload(client, data)
        told = (await client.get(f"/v1/files/{file_id}")).json()
        content = await client.get(f"/v1/files/{file_id}/content")
    assert content.content == data
    assert (told["bytes"], told["filename"], told["purpose"]) == (len(data), "in.jsonl", "batch")
    assert (told["object"], told["status"]) == ("file", "processed")


async def test_a_path_that_is_not_there_leads_nowhere_else(tmp_path: Path) -> None:
    """Behind a proxy that ends TLS a client would be led to http, and say all in the clear."""
    async with opened(tmp_path) as rig, asked(rig) as client:
        for path in ("/v1/files/", "/v1/batches/"):
            assert (await client.get(path)).status_code == 404
            assert (await client.post(path, json={})).status_code == 404


async def test_a_file_ends_with_its_last_byte(tmp_path: Path) -> None:
    """Else the client's next request would come before the end of this answer."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async with opened(tmp_path) as rig:
        await rig.add_input(DATA, chunk_bytes=50)
        files = FileAnswers(FileDesk(rig.files, BOUNDS, lambda: 0.0), BOUNDS.max_file_bytes, 30.0)
        scope = {"type": "http", "path_params": {"file_id": INPUT}, TENANT: NOBODY}
        response = await files.content(Request(scope, receive))
        await response(scope, receive, send)
    bodies = [message for message in sent if message["type"] == "http.response.body"]
    assert b"".join(message["body"] for message in bodies) == DATA
    assert all(message["body"] for message in bodies)
    assert [message["more_body"] for message in bodies] == [True] * (len(bodies) - 1) + [False]
    assert len(bodies) > 1


async def test_who_takes_next_to_nothing_of_a_file_loses_the_connection_and_the_place(
    tmp_path: Path,
) -> None:
    class Trickle:
        is_there = True

        def cut(self) -> None:
            self.is_there = False

    async def send(message: Message) -> None:
        await asyncio.Event().wait()

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async with opened(tmp_path) as rig:
        await rig.add_input(DATA, chunk_bytes=50)
        desk = FileDesk(rig.files, BOUNDS, lambda: 0.0)
        files = FileAnswers(desk, BOUNDS.max_file_bytes, 0.01)
        for _ in range(5):  # more than a tenant has places
            connection = Trickle()
            scope: dict[str, Any] = {"type": "http", "path_params": {"file_id": INPUT}}
            scope |= {TENANT: NOBODY, CONNECTION: connection}
            response = await files.content(Request(scope, receive))
            await response(scope, receive, send)
            assert not connection.is_there


async def test_who_leaves_amid_an_upload_is_no_fault_of_ours(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    head = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nabc'
    messages: list[Message] = [
        {"type": "http.request", "body": head, "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Message:
        return messages.pop(0)

    async def send(message: Message) -> None: ...

    kind = (b"content-type", b"multipart/form-data; boundary=x")
    scope = {"type": "http", "method": "POST", "path": "/v1/files", "raw_path": b"/v1/files"}
    scope |= {"query_string": b"", "headers": [kind], "scheme": "http", "server": ("h", 1)}
    scope |= {"root_path": "", "http_version": "1.1"}
    async with opened(tmp_path) as rig:
        app = app_of(rig, Anybody(), BOUNDS, Runner(rig.needs), lambda: 0.0)
        await app(scope, receive, send)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_uploads_that_are_wrong(tmp_path: Path) -> None:
    file = {"file": ("in.jsonl", DATA)}
    batch = {"purpose": "batch"}
    async with opened(tmp_path) as rig, asked(rig) as client:

        async def error(**form: Any) -> tuple[int, str, str | None]:
            return error_of(await client.post("/v1/files", **form))

        invalid = "request_invalid"
        wrong = {"purpose": "assistants"}
        assert await error(files=file, data=wrong) == (400, invalid, "purpose")
        assert await error(files={"other": b"x"}, data=batch) == (400, invalid, "file")
        assert (await error(json=batch))[:2] == (415, "unsupported_media_type")
        assert (await error(data={"file": "x" * 1000, **batch}))[0] == 415
        packed = {"content-encoding": "gzip"}
        assert (await error(files=file, data=batch, headers=packed))[0] == 415
        kind = {"content-type": "multipart/form-data; boundary=x"}
        assert await error(content=b"--y\r\nno form", headers=kind) == (400, invalid, "body")
        kind = {"content-type": "multipart/form-data; boundary=x; charset=undefined"}
        part = b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nb\xff\r\n--x--\r\n'
        assert await error(content=part, headers=kind) == (400, invalid, "body")
        expiring = {**batch, "expires_after[anchor]": "created_at"}
        assert await error(files=file, data=expiring) == (400, invalid, "expires_after")
        page = {"origin": "https://elsewhere.example"}
        assert (await error(files=file, data=batch, headers=page))[:2] == (
            403,
            "origin_not_allowed",
        )
        for size in (100_001, 300_000):
            large = {"file": ("in.jsonl", b"x" * size)}
            assert await error(files=large, data=batch) == (413, "file_too_large", "file")
        assert (await client.get("/v1/files")).json()["data"] == []


async def test_the_charset_of_a_form_is_not_for_its_client_to_choose(tmp_path: Path) -> None:
    """Each field is decoded by it on the event loop, by some in minutes for a megabyte."""
    field = '--x\r\ncontent-disposition: form-data; name="{}"\r\n\r\n{}\r\n'
    file = field.format('file"; filename="in.jsonl', DATA.decode())
    form = (field.format("purpose", "batch") + file + "--x--\r\n").encode()
    async with opened(tmp_path) as rig, asked(rig) as client:

        async def post(kind: str) -> httpx.Response:
            headers = {"content-type": f"multipart/form-data; boundary=x{kind}"}
            return await client.post("/v1/files", content=form, headers=headers)

        for name in ("latin-1", "utf-7", '"punycode"', "", "idna", "utf-8 ; CHARSET = utf_16"):
            assert error_of(await post(f"; charset={name}")) == (400, "request_invalid", "body")
        for kind in ("", "; charset=utf-8", '; Charset="UTF-8"', "; charset=us-ascii"):
            assert (await post(kind)).status_code == 200


async def test_a_tenants_files_are_bounded_together(tmp_path: Path) -> None:
    async with opened(tmp_path) as rig, asked(rig) as client:
        first = await upload(client, b"x" * 90_000)
        form = {"files": {"file": ("in.jsonl", b"x" * 90_000)}, "data": {"purpose": "batch"}}
        answer = await client.post("/v1/files", **form)  # type: ignore[arg-type]
        assert error_of(answer) == (413, "storage_full", "file")
        await client.delete(f"/v1/files/{first}")
        await upload(client, b"x" * 90_000)


async def test_what_an_upload_left_is_gone_with_the_next_start(tmp_path: Path) -> None:
    async with opened(tmp_path) as rig:
        await rig.add_input(DATA)
        file = await rig.files.find("", "file-input")
        assert file is not None
        half = replace(file, file_id="file-half")
        assert await rig.files.begin(half, 10**9)
        await rig.files.add_chunk("file-half", 0, b"x")
        assert await rig.files.find("", "file-half") is None
        await rig.files.drop_unfinished()
        assert await rig.files.chunk("file-half", 0) is None
        assert await rig.files.chunk("file-input", 0) == DATA[:64]


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"endpoint": "/v1/other"}, "endpoint"),
        ({"endpoint": 3}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "15d"}, "completion_window"),
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"output_expires_after": {"seconds": 1}}, "output_expires_after"),
    ],
)
async def test_batches_that_are_wrong(tmp_path: Path, changed: dict[str, Any], param: str) -> None:
    async with opened(tmp_path) as rig, asked(rig) as client:
        body = {**BODY, "input_file_id": await upload(client), **changed}
        answer = await client.post("/v1/batches", json=body)
        assert error_of(answer) == (400, "request_invalid", param)
        assert (await client.get("/v1/batches")).json()["data"] == []


async def test_a_batch_is_told_and_cancelled(tmp_path: Path) -> None:
    async with opened(tmp_path) as rig, asked(rig) as client:
        body = {**BODY, "input_file_id": await upload(client), "metadata": {"a": "b"}}
        made = (await client.post("/v1/batches", json=body)).json()
        assert made == (await client.get(f"/v1/batches/{made['id']}")).json()
        assert made["status"] == "validating"
        assert made["expires_at"] - made["created_at"] == 24 * 3600
        assert made["metadata"] == {"a": "b"}
        assert made["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
        cancelled = (await client.post(f"/v1/batches/{made['id']}/cancel")).json()
        assert cancelled["status"] == "cancelling"
        assert cancelled["cancelling_at"] is not None
        stored = await rig.batches.get(made["id"])
        assert stored is not None
        assert stored.status is BatchStatus.CANCELLING
        again = await client.post(f"/v1/batches/{made['id']}/cancel")
        assert again.json()["status"] == "cancelling"


async def test_one_that_has_ended_is_not_cancelled(tmp_path: Path) -> None:
    async with opened(tmp_path) as rig, asked(rig) as client:
        await rig.add_input(DATA)
        await rig.add_batch()
        assert (await rig.run()).status is BatchStatus.COMPLETED
        answer = await client.post("/v1/batches/batch_one/cancel")
        assert error_of(answer) == (409, "batch_not_open", None)
        output = (await client.get("/v1/batches/batch_one")).json()["output_file_id"]
        body = {**BODY, "input_file_id": output}
        answer = await client.post("/v1/batches", json=body)
        assert error_of(answer) == (400, "request_invalid", "input_file_id")
        content = await client.get(f"/v1/files/{output}/content")
        assert content.text.count("\n") == 1
        assert (await client.delete(f"/v1/files/{output}")).json()["deleted"]
        assert (await client.get(f"/v1/files/{output}/content")).status_code == 404


async def test_too_many_batches_have_to_wait(tmp_path: Path) -> None:
    async with opened(tmp_path) as rig, asked(rig) as client:
        body = {**BODY, "input_file_id": await upload(client)}
        for _ in range(2):
            assert (await client.post("/v1/batches", json=body)).status_code == 200
        answer = await client.post("/v1/batches", json=body)
        assert error_of(answer) == (429, "queue_full", None)
        assert int(answer.headers["retry-after"]) > 0


async def test_a_tenants_open_batches_count_beside_its_files(tmp_path: Path) -> None:
    data = line("a", "x" * 60_000)
    async with opened(tmp_path) as rig, asked(rig) as client:
        body = {**BODY, "input_file_id": await upload(client, data)}
        first = (await client.post("/v1/batches", json=body)).json()
        answer = await client.post("/v1/batches", json=body)
        assert error_of(answer) == (413, "storage_full", "input_file_id")
        assert len((await client.get("/v1/batches")).json()["data"]) == 1
        page = {"origin": "https://elsewhere.example"}
        refused = await client.post(f"/v1/batches/{first['id']}/cancel", headers=page)
        assert error_of(refused)[:2] == (403, "origin_not_allowed")
        assert (await client.get(f"/v1/batches/{first['id']}")).json()["status"] == "validating"
        await client.post(f"/v1/batches/{first['id']}/cancel")
        await BatchRun(first["id"], rig.needs).run()
        assert (await client.post("/v1/batches", json=body)).status_code == 200


def key_file(folder: Path) -> KnownCallers:
    path = folder / "keys"
    path.write_text(f"one {digest('k1')}\ntwo {digest('k2')}\n")
    return KnownCallers(ApiKeys(path))


def stored(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.glob("batch.sqlite*"))


async def test_tenants_see_nothing_of_each_other(tmp_path: Path) -> None:
    one, two = ({"authorization": f"Bearer {key}"} for key in ("k1", "k2"))
    async with opened(tmp_path) as rig, asked(rig, key_file(tmp_path)) as client:
        file_id = await upload(client, headers=one)
        body = {**BODY, "input_file_id": file_id}
        batch_id = (await client.post("/v1/batches", json=body, headers=one)).json()["id"]
        for method, path in [
            ("GET", f"/v1/files/{file_id}"),
            ("GET", f"/v1/files/{file_id}/content"),
            ("DELETE", f"/v1/files/{file_id}"),
            ("GET", f"/v1/batches/{batch_id}"),
            ("POST", f"/v1/batches/{batch_id}/cancel"),
        ]:
            assert error_of(await client.request(method, path, headers=two))[0] == 404, path
            assert error_of(await client.request(method, path))[:2] == (401, "invalid_api_key")
        answer = await client.post("/v1/batches", json=body, headers=two)
        assert error_of(answer) == (400, "request_invalid", "input_file_id")
        for path in ("/v1/files", "/v1/batches"):
            assert (await client.get(path, headers=two)).json()["data"] == []
            assert len((await client.get(path, headers=one)).json()["data"]) == 1
        assert (await client.get("/health")).status_code == 200
    assert b"k1" not in stored(tmp_path), "keys are kept nowhere"


async def test_what_crashes_is_found_by_the_id_that_its_client_gave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def crash(*_: object) -> None:
        raise RuntimeError("of ours")

    async with opened(tmp_path) as rig:
        monkeypatch.setattr(rig.batches, "find", crash)
        async with asked(rig, raises=False) as client:
            answer = await client.get("/v1/batches/batch_1", headers={"x-request-id": "mine"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "mine")
    assert "request mine" in answer.json()["error"]["message"]
    (record,) = [each for each in caplog.records if each.exc_info]
    assert record.__dict__["request"] == "mine"


async def test_other_paths_and_bodies(tmp_path: Path) -> None:
    async with opened(tmp_path) as rig, asked(rig) as client:
        assert error_of(await client.get("/v1/nothing"))[:2] == (404, "not_found")
        assert error_of(await client.put("/v1/files"))[0] == 405
        for kind, body, status in [
            ("text/plain", b"{}", 415),
            ("application/json", b"[]", 400),
            ("application/json", b"{", 400),
            ("application/json", b" " * (MAX_BODY_BYTES + 1), 413),
        ]:
            headers = {"content-type": kind}
            answer = await client.post("/v1/batches", content=body, headers=headers)
            assert error_of(answer)[0] == status


async def test_what_no_database_takes_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path) as rig, asked(rig) as client:
        for method, path, status in [
            ("GET", "/v1/files/file-%00", 404),
            ("GET", "/v1/files/file-%00/content", 404),
            ("DELETE", "/v1/files/file-%00", 404),
            ("GET", "/v1/batches/%00", 404),
            ("POST", "/v1/batches/%00/cancel", 404),
            ("GET", "/v1/files?after=%00", 400),
            ("GET", "/v1/files?purpose=%00", 400),
            ("GET", "/v1/batches?after=%00", 400),
        ]:
            assert error_of(await client.request(method, path))[0] == status, path
        answer = await client.post("/v1/batches", json={**BODY, "input_file_id": "\0"})
        assert error_of(answer) == (400, "request_invalid", "input_file_id")


async def test_one_tenants_uploads_leave_room_for_others(tmp_path: Path) -> None:
    kind = {"content-type": "multipart/form-data; boundary=x", "authorization": "Bearer k1"}
    begun: asyncio.Queue[None] = asyncio.Queue()

    async def endless() -> AsyncIterator[bytes]:
        yield b"--x\r\n"
        begun.put_nowait(None)
        await asyncio.Event().wait()

    async with opened(tmp_path) as rig, asked(rig, key_file(tmp_path)) as client:

        async def hang() -> None:
            await client.post("/v1/files", content=endless(), headers=kind)

        async with asyncio.TaskGroup() as tasks:
            hanging = [tasks.create_task(hang(), name=f"upload-{i}") for i in range(4)]
            for _ in hanging:
                await begun.get()
            answer = await client.post("/v1/files", content=b"--x", headers=kind)
            assert error_of(answer) == (429, "queue_full", None)
            await upload(client, headers={"authorization": "Bearer k2"})
            for each in hanging:
                each.cancel()


async def test_one_tenants_downloads_leave_room_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = ({"authorization": f"Bearer {key}"} for key in ("k1", "k2"))
    path = f"/v1/files/{INPUT}/content"
    amid, go_on = asyncio.Queue[None](), asyncio.Event()
    chunk = FileStore.chunk

    async def held(self: FileStore, file_id: str, number: int) -> bytes | None:
        if (file_id, number) == (INPUT, 1):
            amid.put_nowait(None)
            await go_on.wait()
        return await chunk(self, file_id, number)

    monkeypatch.setattr(FileStore, "chunk", held)
    async with opened(tmp_path) as rig, asked(rig, key_file(tmp_path)) as client:
        await rig.add_input(DATA, tenant="one")
        async with asyncio.TaskGroup() as tasks:

            async def begun() -> asyncio.Task[httpx.Response]:
                task = tasks.create_task(client.get(path, headers=one), name="download")
                await amid.get()
                return task

            reading = [await begun() for _ in range(4)]
            answer = await client.get(path, headers=one)
            assert error_of(answer) == (429, "queue_full", None)
            assert int(answer.headers["retry-after"]) > 0
            theirs = await upload(client, headers=two)
            assert (await client.get(f"/v1/files/{theirs}/content", headers=two)).content == DATA
            left = reading.pop()
            left.cancel()
            with suppress(asyncio.CancelledError):
                await left
            reading.append(await begun())
            assert (await client.get(path, headers=one)).status_code == 429
            go_on.set()
        assert all(each.result().content == DATA for each in reading)


async def test_an_upload_that_never_ends_is_given_up(tmp_path: Path) -> None:
    async def endless() -> AsyncIterator[bytes]:
        yield b"--x\r\n"
        await asyncio.Event().wait()

    kind = {"content-type": "multipart/form-data; boundary=x"}
    async with opened(tmp_path) as rig, asked(rig, bounds=BOUNDS._replace(patience_s=0)) as client:
        answer = await client.post("/v1/files", content=endless(), headers=kind)
        assert error_of(answer)[:2] == (408, "request_timeout")


async def test_a_batch_whose_client_left_is_run_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as rig, asyncio.TaskGroup() as tasks:
        runner, begun = Runner(rig.needs), asyncio.Event()
        running = tasks.create_task(runner.run(), name="runner")
        async with asked(rig, runner=runner) as client:
            body = {**BODY, "input_file_id": await upload(client), "completion_window": "14d"}
            with held_up(monkeypatch, "batch_server.store.batches._add", begun) as go_on:
                posting = tasks.create_task(client.post("/v1/batches", json=body), name="post")
                await begun.wait()
                posting.cancel()
                go_on()
                with suppress(asyncio.CancelledError):
                    await posting
        while runner.num_open:
            await asyncio.sleep(0)
        running.cancel()
        (batch,) = await rig.batches.page("", None, 10)
    assert batch.status is BatchStatus.COMPLETED


async def test_an_upload_whose_client_left_takes_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as rig, asked(rig) as client, asyncio.TaskGroup() as tasks:
        begun = asyncio.Event()
        with held_up(monkeypatch, "batch_server.store.files._begin", begun) as go_on:
            uploading = tasks.create_task(upload(client, b"x" * 90_000), name="upload")
            await begun.wait()
            uploading.cancel()
            go_on()
            with suppress(asyncio.CancelledError):
                await uploading
        await upload(client, b"x" * 90_000)
