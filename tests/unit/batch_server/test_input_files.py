"""Files of requests that are wrong, odd, or deleted while they are read."""

import codecs
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from batch_server.runner.input_file import InputBounds
from batch_server.status import BatchStatus
from tests.unit.batch_server.rig import BATCH, INPUT, FakeRouters, Rig, line, opened

DATA = b"".join(line(name, "one") for name in "abc")


WRONG: dict[str, tuple[bytes, str, str | None]] = {
    "json": (b"{nope\n", "invalid_json_line", None),
    "twice": (b'{"custom_id": "z", "custom_id": "y"}\n', "invalid_json_line", None),
    "long name": (b'{"%b": 1, "%b": 2}\n' % (2 * (b"x" * 900,)), "invalid_json_line", None),
    "object": (b"[1]\n", "invalid_json_line", None),
    "too large": (
        line("z", "x", temperature=5).replace(b": 5", b": 1e999"),
        "invalid_json_line",
        None,
    ),
    "no id": (b'{"method": "POST"}\n', "invalid_custom_id", "custom_id"),
    "odd id": (line("\u0000", "x"), "invalid_custom_id", "custom_id"),
    "id of two lines": (line("a\u2028b", "x"), "invalid_custom_id", "custom_id"),
    "long id": (line("x" * 513, "x"), "invalid_custom_id", "custom_id"),
    "same id": (line("a", "x"), "duplicate_custom_id", "custom_id"),
    "url": (line("z", "x").replace(b"/chat", b""), "mismatched_url", "url"),
    "method": (line("z", "x").replace(b"POST", b"GET"), "invalid_method", "method"),
    "stream": (line("z", "x", stream=True), "invalid_body", "body.stream"),
    "first token": (line("z", "x", ttft_ms=1), "invalid_body", "body.ttft_ms"),
    "pace": (line("z", "x", tpot_ms=1), "invalid_body", "body.tpot_ms"),
    "class": (line("z", "x", priority="realtime"), "invalid_body", "body.priority"),
    "salt": (line("z", "x", cache_salt=3), "invalid_body", "body.cache_salt"),
    "body": (
        json.dumps(
            {"custom_id": "z", "method": "POST", "url": "/v1/chat/completions", "body": 1}
        ).encode(),
        "invalid_body",
        "body",
    ),
    "too long": (line("z", "x" * 3000), "line_too_long", None),
}


@pytest.mark.parametrize("name", WRONG)
async def test_one_wrong_line_fails_the_batch_before_any_work(tmp_path: Path, name: str) -> None:
    data, code, param = WRONG[name]
    routers = FakeRouters()
    async with opened(tmp_path, routers, bounds=InputBounds(10, 2000)) as rig:
        await rig.add_input(line("a", "one") + b"\n" + data)
        await rig.add_batch()
        batch = await rig.run()
        assert await rig.batches.unanswered(BATCH, 0, 10) == []
    assert batch.status is BatchStatus.FAILED
    (error,) = batch.errors
    assert (error.code, error.param, error.line) == (code, param, 3)
    assert error.message.startswith("line 3: ")
    assert len(error.message) < 250
    assert routers.asked == []


async def test_a_file_may_begin_with_the_mark_of_utf8(tmp_path: Path) -> None:
    routers = FakeRouters()
    async with opened(tmp_path, routers) as rig:
        await rig.add_input(codecs.BOM_UTF8 + line("a", "one") + line("b", "two"))
        await rig.add_batch()
        batch = await rig.run()
    assert (batch.status, batch.num_completed) == (BatchStatus.COMPLETED, 2)


@pytest.mark.parametrize(
    ("data", "codes"),
    [
        (b"", {"empty_file": 1}),
        (codecs.BOM_UTF8, {"empty_file": 1}),
        (line("a", "x") + codecs.BOM_UTF8 + line("b", "x"), {"invalid_json_line": 1}),
        (b"\n \n", {"empty_file": 1}),
        (b"".join(line(str(i), "x") for i in range(11)), {"too_many_lines": 1}),
        (b"?\n" * 200, {"invalid_json_line": 100}),
    ],
)
async def test_files_that_are_wrong_as_a_whole(
    tmp_path: Path, data: bytes, codes: dict[str, int]
) -> None:
    async with opened(tmp_path, bounds=InputBounds(10, 2000)) as rig:
        await rig.add_input(data)
        await rig.add_batch()
        batch = await rig.run()
    assert batch.status is BatchStatus.FAILED
    assert Counter(error.code for error in batch.errors) == codes


async def test_a_file_that_is_gone_fails_the_batch(tmp_path: Path) -> None:
    async with opened(tmp_path) as rig:
        await rig.add_input(DATA)
        await rig.add_batch()
        assert await rig.files.delete("", INPUT)
        batch = await rig.run()
    assert batch.status is BatchStatus.FAILED


def deleted_at(rig: Rig, at: int) -> Callable[[str, int], Awaitable[bytes | None]]:
    """Reads pieces of the file, which is deleted before that one is."""
    found = rig.files.chunk

    async def chunk(file_id: str, number: int) -> bytes | None:
        if number == at:
            await rig.files.delete("", INPUT)
        return await found(file_id, number)

    return chunk


@pytest.mark.parametrize("at", [1, 2, 3])
async def test_a_file_that_is_deleted_while_it_is_read_is_not_said_to_be_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    async with opened(tmp_path) as rig:
        await rig.add_input(line("a", "one") + line("b", "two"))
        await rig.add_batch()
        monkeypatch.setattr(rig.files, "chunk", deleted_at(rig, at))
        batch = await rig.run()
    (error,) = batch.errors
    assert (error.code, error.message) == ("not_found", "the file was deleted")


async def test_a_file_that_is_deleted_while_it_is_read_again_breaks_nothing_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as rig:
        await rig.add_input(line("a", "one") + line("b", "two"))
        await rig.add_batch()
        clear_lines = rig.batches.clear_lines

        async def cleared(batch_id: str) -> None:
            monkeypatch.setattr(rig.files, "chunk", deleted_at(rig, 1))
            await clear_lines(batch_id)

        monkeypatch.setattr(rig.batches, "clear_lines", cleared)
        batch = await rig.run()
    assert batch.status is BatchStatus.FAILED
