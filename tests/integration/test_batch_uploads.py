"""Files that come and go by real gRPC: in bounds, whole or not at all."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from diptych.client import BatchClient
from diptych.errors import (
    FileTooLargeError,
    InvalidRequestError,
    NotFoundError,
    QueueFullError,
    SlowClientError,
    StorageFullError,
)
from diptych.rpc.channel import open_channel
from diptych.v1 import batches_pb2 as public
from diptych.v1 import batches_pb2_grpc
from tests.integration.batch_rig import (
    UPLOADS,
    Served,
    content,
    sent,
    served,
    upload_refused,
    written,
)
from tests.waiting import until, within


async def test_files_are_taken_and_read_in_pieces_of_any_size(tmp_path: Path) -> None:
    data = bytes(range(256)) * 3000
    pieces = [data[:1], data[1:300_000], data[300_000:700_000], b"", data[700_000:]]
    async with served(tmp_path) as at, at.client() as client:
        file = public.NewFile(filename="x\n.jsonl", num_bytes=len(data))
        stored = (await at.stub.UploadFile(iter(sent(file, *pieces)))).file
        assert (stored.filename, stored.num_bytes) == ("x_.jsonl", len(data))
        assert await content(client, stored.id) == data
        listed = (await at.http.get("/v1/files")).json()["data"]
        assert [each["id"] for each in listed] == [stored.id]
        await client.delete(stored.id)
        with pytest.raises(NotFoundError):
            await content(client, stored.id)
        assert await at.num_kept() == 0


@pytest.mark.parametrize(
    ("parts", "field"),
    [
        ([], "file"),
        ([b"x"], "file"),
        ([public.NewFile(num_bytes=2), b"xyz"], "file"),
        ([public.NewFile(num_bytes=2), b"x"], "file"),
        ([public.NewFile(num_bytes=2), public.NewFile(num_bytes=2)], "data"),
        ([public.NewFile(num_bytes=700_000), b"x" * 600_000], "data"),
    ],
)
async def test_an_upload_that_is_wrong_leaves_nothing(
    tmp_path: Path, parts: list[public.NewFile | bytes], field: str
) -> None:
    async with served(tmp_path) as at:
        error = await upload_refused(at.stub.UploadFile(iter(sent(*parts))))
        assert isinstance(error, InvalidRequestError)
        assert error.field == field
        assert await at.num_kept() == 0


async def test_files_are_bounded_before_they_come(tmp_path: Path) -> None:
    async with served(tmp_path) as at:
        large = public.NewFile(num_bytes=UPLOADS.max_file_bytes + 1)
        error = await upload_refused(at.stub.UploadFile(iter(sent(large))))
        assert isinstance(error, FileTooLargeError)
        assert error.metadata["field"] == "file"
        data = b"x" * 400_000
        file = public.NewFile(num_bytes=800_000)
        first = (await at.stub.UploadFile(iter(sent(file, data, data)))).file
        path = written(tmp_path, b"x" * 800_000)
        async with at.client() as client:
            for _ in range(5):
                with pytest.raises(StorageFullError):
                    await client.upload(path)
        await at.stub.DeleteFile(public.DeleteFileRequest(id=first.id))
        await at.stub.UploadFile(iter(sent(file, data, data)))


async def test_the_reason_of_a_refusal_outlives_what_is_still_being_sent(tmp_path: Path) -> None:
    async with served(tmp_path) as at, at.client() as client:
        path = written(tmp_path, b"x" * (UPLOADS.max_file_bytes + 1))
        async with asyncio.TaskGroup() as uploads:
            for _ in range(4):  # as many as a tenant may have at a time
                uploads.create_task(too_large(client, path))


async def too_large(client: BatchClient, path: Path) -> None:
    for _ in range(75):
        with pytest.raises(FileTooLargeError):
            await client.upload(path)


async def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    """As on a disk that is broken; nobody has cancelled anything."""
    async with served(tmp_path) as at, at.client() as client:
        with pytest.raises(OSError, match="Input/output error"):
            await client.upload(Path("/proc/self/mem"))
        await until(lambda: at.files._uploading._taken.total() == 0, 10, "the upload ends")
        assert await at.num_kept() == 0


async def test_a_file_may_have_a_name_that_is_not_all_characters(tmp_path: Path) -> None:
    """As one of a system before UTF-8; nobody has cancelled anything."""
    path = tmp_path / os.fsdecode(b"caf\xe9.jsonl")
    path.write_bytes(b"x")
    async with served(tmp_path) as at, at.client() as client:
        assert await content(client, await client.upload(path)) == b"x"
        (listed,) = (await at.http.get("/v1/files")).json()["data"]
        assert listed["filename"] == "caf?.jsonl"


async def test_a_client_that_leaves_amid_an_upload_leaves_nothing(tmp_path: Path) -> None:
    """However it leaves; and all its places and its room are there again."""
    async with served(tmp_path) as at:
        for leave in (cancelled, vanished) * 5:
            await leave(at)
            await until(lambda: at.files._uploading._taken.total() == 0, 10, "the upload ends")
            assert await at.num_kept() == 0
        await at.stub.UploadFile(iter(sent(public.NewFile(num_bytes=1), b"x")))


async def begun(stub: Any, at: Served, bytes_sent: int) -> Any:
    """An upload of which a part is stored, and the rest does not come."""
    call = stub.UploadFile()
    await call.write(next(iter(sent(public.NewFile(num_bytes=900_000)))))
    for _ in range(bytes_sent // 100_000):
        await call.write(next(iter(sent(b"x" * 100_000))))
    async with within(10):
        while await at.num_kept() < 2:
            await asyncio.sleep(0.01)
    return call


async def cancelled(at: Served) -> None:
    (await begun(at.stub, at, 400_000)).cancel()


async def vanished(at: Served) -> None:
    """Its connection ends."""
    channel = open_channel(at.address)
    call = await begun(batches_pb2_grpc.BatchesStub(channel), at, 600_000)
    await channel.close(0)
    assert call.done()


async def test_a_file_that_does_not_come_is_given_up(tmp_path: Path) -> None:
    async with served(tmp_path, uploads=UPLOADS._replace(patience_s=0.3)) as at:
        call = at.stub.UploadFile()
        await call.write(next(iter(sent(public.NewFile(num_bytes=9)))))
        assert isinstance(await upload_refused(call), SlowClientError)
        assert await at.num_kept() == 0


async def test_uploads_of_a_tenant_are_counted_in_both_protocols(tmp_path: Path) -> None:
    async with served(tmp_path) as at:
        calls = [await begun_first(at) for _ in range(4)]
        error = await upload_refused(
            at.stub.UploadFile(iter(sent(public.NewFile(num_bytes=1), b"x")))
        )
        assert isinstance(error, QueueFullError)
        assert error.retry_after_s is not None
        form: Any = {"files": {"file": ("in.jsonl", b"x")}, "data": {"purpose": "batch"}}
        assert (await at.http.post("/v1/files", **form)).status_code == 429
        for call in calls:
            call.cancel()
        await until(lambda: at.files._uploading._taken.total() == 0, 10, "the uploads end")
        assert (await at.http.post("/v1/files", **form)).status_code == 200


async def begun_first(at: Served) -> Any:
    num_before = await at.num_kept()
    call: Any = at.stub.UploadFile()
    await call.write(next(iter(sent(public.NewFile(num_bytes=9)))))
    async with within(10):
        while await at.num_kept() == num_before:
            await asyncio.sleep(0.01)
    return call
