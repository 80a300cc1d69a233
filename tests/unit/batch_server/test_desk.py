"""What both protocols of the batch server stand on, where no client is needed to see it."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_server.desk.checks import PageAsked, checked_page
from batch_server.desk.chunks import in_chunks
from batch_server.desk.files import CHUNK_BYTES, FileDesk, UploadBounds
from batch_server.desk.tenant_places import TenantPlaces
from batch_server.records import FileKind, StoredFile, new_id
from batch_server.runner.sender import AnswerBounds
from batch_server.store.files import FileStore
from diptych.errors import InvalidRequestError, NotFoundError, QueueFullError
from tests.unit.batch_server.rig import INPUT, FakeRouters, line, opened


async def of(pieces: Sequence[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


@given(st.lists(st.binary(max_size=20), max_size=20), st.integers(1, 7))
def test_chunks_are_of_one_size_and_say_the_same(pieces: list[bytes], size: int) -> None:
    async def regrouped() -> list[bytes]:
        return [chunk async for chunk in in_chunks(of(pieces), size)]

    chunks = asyncio.run(regrouped())
    assert b"".join(chunks) == b"".join(pieces)
    assert all(len(chunk) == size for chunk in chunks[:-1])
    assert all(0 < len(chunk) <= size for chunk in chunks)


def test_ids_say_what_they_are_of_and_sort_by_when_they_were_made() -> None:
    begins: dict[FileKind, str] = {"file": "file-", "batch": "batch_"}
    for kind, begin in begins.items():
        ids = [new_id(kind, now_s) for now_s in (9.0, 9.00001, 10.0, 1e9)]
        assert all(each.startswith(begin) for each in ids)
        assert ids == sorted(ids)
        assert new_id(kind, 9.0) != ids[0]


def test_a_page_has_a_thousand_at_the_most_however_many_are_asked_for() -> None:
    """OpenAI's files are asked for by ten thousand."""
    last = new_id("file", 1.0)
    assert checked_page(10_000, last, 10_000, kind="file") == PageAsked(1000, last)
    assert checked_page(999, None, 10_000, kind="file") == PageAsked(999, None)
    for limit in (None, 0, 10_001):
        with pytest.raises(InvalidRequestError, match="from 1 to 10000"):
            checked_page(limit, None, 10_000, kind="file")


async def test_places_are_a_tenants_and_everybodys() -> None:
    places = TenantPlaces("many are busy", most_of_tenant=2, most=3)
    await places.wait_idle()
    with places.taken("a"), places.taken("a"):
        with pytest.raises(QueueFullError, match="many are busy"), places.taken("a"):
            pass
        with places.taken("b"), pytest.raises(QueueFullError), places.taken("c"):
            pass
        waiting = places.wait_idle()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await waiting
    await places.wait_idle()
    with places.taken("c"), places.taken("c"):
        pass


@pytest.mark.parametrize("is_result", [False, True])
async def test_a_file_that_is_deleted_while_it_is_read_does_not_end_as_if_it_were_whole(
    tmp_path: Path, is_result: bool
) -> None:
    async with opened(tmp_path) as rig:
        data = b"".join(line(str(index), "x") for index in range(20))  # of results 16 are a piece
        await rig.add_input(data)
        await rig.add_batch()
        batch = await rig.run()
        desk = FileDesk(rig.files, UploadBounds(10**6, 10**6, 1.0), lambda: 0.0)
        file = await desk.find("", (is_result and batch.output_file_id) or INPUT)
        whole = b"".join([piece async for piece in desk.content(file)])
        assert len(whole) == file.num_bytes
        content = desk.content(file)
        read = [await anext(content)]
        await desk.delete("", file.file_id)
        with pytest.raises(NotFoundError):
            read += [piece async for piece in content]
        assert 0 < len(b"".join(read)) < file.num_bytes


def large(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, content=b'{"text": "' + b"x" * 2**20 + b'"}')


async def test_of_large_results_one_line_is_in_memory_and_it_is_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[bytes] = []
    results_after = FileStore.results_after

    async def counted(
        self: FileStore, file: StoredFile, number: int
    ) -> Sequence[tuple[int, bytes]]:
        found = await results_after(self, file, number)
        fetched.extend(each for _, each in found)
        return found

    monkeypatch.setattr(FileStore, "results_after", counted)
    async with opened(tmp_path, FakeRouters(large), answers=AnswerBounds(2**21, 60.0)) as rig:
        await rig.add_input(b"".join(line(str(index), "x") for index in range(16)))
        await rig.add_batch()
        batch = await rig.run()
        desk = FileDesk(rig.files, UploadBounds(10**6, 10**6, 1.0), lambda: 0.0)
        file = await desk.find("", batch.output_file_id or "")
        content = desk.content(file)
        pieces = [await anext(content)]
        assert len(fetched) == 1
        pieces += [piece async for piece in content]
    assert len(fetched) == 16
    assert b"".join(pieces) == b"".join(fetched)
    assert max(map(len, pieces)) == CHUNK_BYTES


async def test_results_are_fetched_together_up_to_as_many_bytes_as_a_piece(
    tmp_path: Path,
) -> None:
    sizes = {"a": 100, "b": 100_000, "c": 100_000, "d": 100_000, "e": 600_000, "f": 1}

    def answering(request: httpx.Request) -> httpx.Response:
        name = json.loads(request.content)["messages"][0]["content"]
        return httpx.Response(200, json={"text": "x" * sizes[name]})

    async with opened(tmp_path, FakeRouters(answering), answers=AnswerBounds(2**20, 60.0)) as rig:
        await rig.add_input(b"".join(line(name, name) for name in sizes))
        await rig.add_batch()
        batch = await rig.run()
        file = await rig.files.find("", batch.output_file_id or "")
        assert file is not None
        numbers, number = list[list[int]](), 0
        while found := await rig.files.results_after(file, number):
            numbers.append([each for each, _ in found])
            number = numbers[-1][-1]
    assert numbers == [[1, 2, 3], [4], [5], [6]]
