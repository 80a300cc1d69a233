"""Batches from their files to their results, by routers that fail in every way."""

import asyncio
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from sqlalchemy.exc import NoResultFound

from batch_server.app import measure
from batch_server.records import Batch, LineResult
from batch_server.runner.input_file import InputBounds
from batch_server.runner.runner import Runner
from batch_server.status import ENDED, BatchEvent, BatchStatus
from batch_server.store.batches import BatchStore
from diptych.telemetry.metrics import Metrics
from tests import metrics
from tests.unit.batch_server.rig import (
    BATCH,
    NOW_S,
    Death,
    FakeRouters,
    KilledError,
    answer_of,
    line,
    opened,
    texts,
    well,
)
from tests.waiting import until

PROMPTS = {"a": "one", "b": "two", "c": "three"}
TWO = line("a", "one") + line("b", "two")
DATA = b"".join(line(name, prompt) for name, prompt in PROMPTS.items())


async def test_every_line_is_answered_once(tmp_path: Path) -> None:
    routers = FakeRouters()
    async with opened(tmp_path, routers) as rig:
        await rig.add_input(DATA + line("d", "four", seed=7))
        await rig.add_batch()
        batch = await rig.run()
        output = await rig.content(batch.output_file_id)
    assert (batch.status, batch.num_lines, batch.num_completed) == (BatchStatus.COMPLETED, 4, 4)
    assert batch.error_file_id is None
    assert [each["custom_id"] for each in output] == ["a", "b", "c", "d"]
    assert {body["priority"] for body in routers.bodies()} == {"batch"}
    by_prompt = {body["messages"][0]["content"]: body for body in routers.bodies()}
    assert by_prompt["four"]["seed"] == 7
    expected = {name: answer_of(by_prompt[prompt]) for name, prompt in PROMPTS.items()}
    assert texts(output) == {**expected, "d": answer_of(by_prompt["four"])}
    first = output[0]
    assert set(first) == {"id", "custom_id", "response", "error"}
    assert (first["response"]["status_code"], first["error"]) == (200, None)
    assert first["response"]["body"]["id"] == f"chatcmpl-{first['response']['request_id']}"


@pytest.mark.parametrize(
    ("max_lines", "status"), [(3, BatchStatus.COMPLETED), (2, BatchStatus.FAILED)]
)
async def test_a_file_may_have_as_many_lines_as_are_taken(
    tmp_path: Path, max_lines: int, status: BatchStatus
) -> None:
    async with opened(tmp_path, bounds=InputBounds(max_lines, 10_000)) as rig:
        await rig.add_input(DATA)
        await rig.add_batch()
        assert (await rig.run()).status is status


@pytest.mark.parametrize("end", [b"\n", b""])
@pytest.mark.parametrize(("more", "status"), [(0, BatchStatus.COMPLETED), (-1, BatchStatus.FAILED)])
async def test_a_line_may_have_as_many_bytes_as_are_taken(
    tmp_path: Path, more: int, status: BatchStatus, end: bytes
) -> None:
    data = line("a", "one").strip()
    async with opened(tmp_path, bounds=InputBounds(10, len(data) + more)) as rig:
        await rig.add_input(data + end)
        await rig.add_batch()
        assert (await rig.run()).status is status


async def test_a_batch_that_has_ended_keeps_no_bodies(tmp_path: Path) -> None:
    async with opened(tmp_path) as rig:
        await rig.add_input(TWO)
        await rig.add_batch()
        await rig.run()
        with pytest.raises(NoResultFound):
            await rig.batches.body(BATCH, 1)


async def test_batches_come_in_pages_the_newest_first(tmp_path: Path) -> None:
    names = ["batch_1", "batch_2", "batch_3"]
    async with opened(tmp_path) as rig:
        for name in names:
            await rig.add_batch(name)
        first = await rig.batches.page("", None, 2)
        rest = await rig.batches.page("", first[-1].batch_id, 2)
        assert await rig.batches.page("another", None, 2) == []
    assert [batch.batch_id for batch in (*first, *rest)] == names[::-1]


async def test_an_answer_stays_as_it_came(tmp_path: Path) -> None:
    raw = b'{"id":"x",  "n": 1.0, "text":"\\u00e9"}'
    routers = FakeRouters(lambda request: httpx.Response(200, content=raw))
    async with opened(tmp_path, routers) as rig:
        await rig.add_input(line("a", "one"))
        await rig.add_batch()
        batch = await rig.run()
        assert batch.output_file_id is not None
        file = await rig.files.find("", batch.output_file_id)
        assert file is not None
        ((_, written),) = await rig.files.results_after(file, 0)
    assert b'"body": ' + raw + b"}" in written


async def test_lines_that_are_refused_are_in_the_error_file(tmp_path: Path) -> None:
    error = {"error": {"message": "temperature: too high", "param": "temperature"}}

    def answering(request: httpx.Request) -> httpx.Response:
        is_wrong = "two" in request.content.decode()
        return httpx.Response(400, json=error) if is_wrong else well(request)

    async with opened(tmp_path, FakeRouters(answering)) as rig:
        await rig.add_input(DATA)
        await rig.add_batch()
        batch = await rig.run()
        (refused,) = await rig.content(batch.error_file_id)
        output = await rig.content(batch.output_file_id)
    assert (batch.status, batch.num_completed, batch.num_failed) == (BatchStatus.COMPLETED, 2, 1)
    assert refused["custom_id"] == "b"
    assert refused["response"]["status_code"] == 400
    assert refused["response"]["body"] == error
    assert [each["custom_id"] for each in output] == ["a", "c"]


async def test_killed_anywhere_it_loses_and_repeats_nothing(tmp_path: Path) -> None:
    """With everything that the process waits for; another goes on with what was stored."""
    template = tmp_path / "template"
    template.mkdir()
    async with opened(template) as rig:
        await rig.add_input(TWO, chunk_bytes=1000)
        await rig.add_batch()
    at = 0
    while await died(shutil.copytree(template, tmp_path / str(at)), at):
        at += 1
    assert at > 15


async def died(folder: Path, at: int) -> bool:
    """Whether a first life ended at that chance; if so, a second has ended the batch well."""
    death = Death(at)
    before, after = FakeRouters(death=death), FakeRouters()
    async with opened(folder, before, death=death) as rig:
        with suppress(KilledError, BaseExceptionGroup):
            await rig.run()
    if not death.is_dead:
        return False
    async with opened(folder, after) as rig:
        batch = await rig.run()
        output = await rig.content(batch.output_file_id)
    assert (batch.status, batch.num_lines) == (BatchStatus.COMPLETED, 2)
    assert (batch.num_completed, batch.num_failed) == (2, 0)
    assert [each["custom_id"] for each in output] == ["a", "b"]
    sent: dict[str, set[bytes]] = {}
    for request in [*before.asked, *after.asked]:
        sent.setdefault(request.headers["x-request-id"], set()).add(request.content)
    assert len(sent) == 2, "ids stay"
    assert all(len(bodies) == 1 for bodies in sent.values()), "seeds stay"
    said = {answer_of(json.loads(body)) for (body,) in sent.values()}
    assert set(texts(output).values()) == said
    return True


def failing(*responses: Callable[[], httpx.Response]) -> FakeRouters:
    """Answers so first, then well."""
    left = list(responses)
    return FakeRouters(lambda request: left.pop(0)() if left else well(request))


def refused_connection() -> httpx.Response:
    raise httpx.ConnectError("refused")


def broken_connection() -> httpx.Response:
    raise httpx.ReadError("broken")


def full() -> httpx.Response:
    return httpx.Response(429, headers={"retry-after": "7"}, json={"error": {}})


@pytest.mark.parametrize("fail", [refused_connection, full, lambda: httpx.Response(401)])
async def test_a_line_waits_for_routers_for_as_long_as_it_takes(
    tmp_path: Path, fail: Callable[[], httpx.Response]
) -> None:
    async with opened(tmp_path, failing(*[fail] * 9), max_attempts=1) as rig:
        await rig.add_input(line("a", "one"))
        await rig.add_batch()
        batch = await rig.run()
    assert (batch.num_completed, batch.num_failed) == (1, 0)


async def test_a_full_router_is_left_alone_and_sent_less(tmp_path: Path) -> None:
    async with opened(tmp_path, failing(full), max_concurrent=4) as rig:
        await rig.add_input(DATA)
        await rig.add_batch()
        began_s = rig.clock_s
        batch = await rig.run()
        assert rig.clock_s - began_s >= 7
        assert rig.slots.pace.limit < 4
        assert rig.slots.num_taken == 0
    assert batch.num_completed == 3


async def test_a_router_that_breaks_off_is_left_for_the_next(tmp_path: Path) -> None:
    routers = failing(broken_connection)
    async with opened(tmp_path, routers, max_concurrent=1) as rig:
        await rig.add_input(DATA)
        await rig.add_batch()
        batch = await rig.run()
    assert batch.num_completed == 3
    assert [request.url.host for request in routers.asked] == ["a", "b", "b", "b"]
    again = [each.content for each in routers.asked if b"one" in each.content]
    assert len(again) == 2
    assert len(set(again)) == 1


async def test_what_always_fails_is_the_result_at_last(tmp_path: Path) -> None:
    routers = FakeRouters(lambda request: broken_connection())
    async with opened(tmp_path, routers, max_attempts=3) as rig:
        await rig.add_input(line("a", "one"))
        await rig.add_batch()
        batch = await rig.run()
        (failed,) = await rig.content(batch.error_file_id)
    assert len(routers.asked) == 3
    assert (batch.status, batch.num_failed) == (BatchStatus.COMPLETED, 1)
    assert failed["response"]["body"]["error"]["code"] == "connection_broken"


async def test_an_expired_batch_says_so_of_each_line(tmp_path: Path) -> None:
    routers = FakeRouters()
    async with opened(tmp_path, routers) as rig:
        await rig.add_input(DATA)
        await rig.add_batch(expires_s=NOW_S - 1)
        batch = await rig.run()
        errors = await rig.content(batch.error_file_id)
    assert routers.asked == []
    assert (batch.status, batch.num_failed) == (BatchStatus.EXPIRED, 3)
    assert [each["error"]["code"] for each in errors] == ["batch_expired"] * 3
    assert {each["response"] for each in errors} == {None}


async def test_a_cancelled_batch_keeps_what_was_answered(tmp_path: Path) -> None:
    async def cancel() -> None:
        await rig.batches.cancel("", BATCH, NOW_S)
        rig.one.look()

    class Cancelling(FakeRouters):
        async def __call__(self, request: httpx.Request) -> httpx.Response:
            if len(self.asked) == 1:
                await cancel()
            return await super().__call__(request)

    async with opened(tmp_path, Cancelling(), max_concurrent=1) as rig:
        await rig.add_input(DATA)
        await rig.add_batch()
        batch = await rig.run()
        errors = await rig.content(batch.error_file_id)
        output = await rig.content(batch.output_file_id)
    assert batch.status is BatchStatus.CANCELLED
    assert {each["error"]["code"] for each in errors} == {"batch_cancelled"}
    assert len(output) >= 1
    assert sorted(each["custom_id"] for each in [*errors, *output]) == ["a", "b", "c"]


async def test_cancelled_before_its_file_was_read(tmp_path: Path) -> None:
    async with opened(tmp_path) as rig:
        await rig.add_input(DATA)
        await rig.add_batch()
        await rig.batches.cancel("", BATCH, NOW_S)
        batch = await rig.run()
    assert (batch.status, batch.num_lines) == (BatchStatus.CANCELLED, 0)
    assert (batch.output_file_id, batch.error_file_id) == (None, None)


async def test_tenants_share_no_cache_and_keys_are_not_sent_on(tmp_path: Path) -> None:
    salts = []
    for tenant in ("x", "y"):
        folder = tmp_path / tenant
        folder.mkdir()
        routers = FakeRouters()
        async with opened(folder, routers) as rig:
            await rig.add_input(line("a", "one", cache_salt="s"), tenant=tenant)
            await rig.add_batch(tenant=tenant)
            await rig.run()
        salts += [body["cache_salt"] for body in routers.bodies()]
        assert "authorization" not in routers.asked[0].headers
    assert len(set(salts)) == 2
    assert all(len(salt) == 64 and salt != "s" for salt in salts)


async def test_lines_with_a_common_beginning_go_together(tmp_path: Path) -> None:
    long = "the same beginning " * 40
    names = ["x1", "y1", "x2", "y2"]
    prompts = {name: (long if name[0] == "x" else "else ") + name for name in names}
    routers = FakeRouters()
    async with opened(tmp_path, routers, max_concurrent=1) as rig:
        await rig.add_input(b"".join(line(name, prompt) for name, prompt in prompts.items()))
        await rig.add_batch()
        await rig.run()
    order = [body["messages"][0]["content"][-2] for body in routers.bodies()]
    assert order in (["x", "x", "y", "y"], ["y", "y", "x", "x"])


async def test_a_run_that_crashes_is_taken_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept, ended = [], asyncio.Event()
    accept, failures = BatchStore.accept, ["the disk is full"]

    async def failing_accept(self: BatchStore, *args: Any) -> None:
        if failures:
            raise OSError(failures.pop())
        await accept(self, *args)

    async def get(self: BatchStore, batch_id: str) -> Batch | None:
        batch = await found(self, batch_id)
        if batch is not None and batch.status in ENDED:
            ended.set()
        return batch

    async def sleep(pause_s: float) -> None:
        slept.append(pause_s)

    found = BatchStore.get
    monkeypatch.setattr(BatchStore, "accept", failing_accept)
    monkeypatch.setattr(BatchStore, "get", get)
    async with opened(tmp_path) as rig, asyncio.TaskGroup() as tasks:
        await rig.add_input(DATA)
        await rig.add_batch()
        runner = Runner(rig.needs, sleep)
        running = tasks.create_task(runner.run(), name="runner")
        await ended.wait()
        running.cancel()
        batch = await rig.get()
    assert slept == [5.0]
    assert batch.num_completed == 3


async def test_what_is_open_and_with_routers_is_told(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    seen: list[dict[str, float]] = []

    def tell() -> dict[str, float]:
        return metrics.parse(generate_latest(registry).decode())

    def look(request: httpx.Request) -> httpx.Response:
        seen.append(tell())
        return well(request)

    routers = FakeRouters(look)
    async with opened(tmp_path, routers, max_concurrent=1) as rig, asyncio.TaskGroup() as tasks:
        await rig.add_input(DATA)
        await rig.add_batch()
        runner = Runner(rig.needs)
        measure(Metrics(registry), runner, rig.slots)
        assert (tell()["diptych_batches_open"], tell()["diptych_batch_lines_sent"]) == (0, 0)
        running = tasks.create_task(runner.run(), name="runner")
        await until(lambda: seen and not runner.num_open, 30, "the batch ends")
        running.cancel()
        after = tell()
    assert len(seen) == 3
    for each in seen:
        assert each["diptych_batches_open"] == 1
        assert each["diptych_batch_lines_sent"] == 1
        assert each["diptych_batch_lines_limit"] == 1
    assert (after["diptych_batches_open"], after["diptych_batch_lines_sent"]) == (0, 0)


async def test_a_result_is_written_once(tmp_path: Path) -> None:
    async with opened(tmp_path) as rig:
        await rig.add_input(DATA)
        await rig.add_batch()
        await rig.batches.accept(BATCH, 3, NOW_S)
        first, second = (LineResult(1, is_error, b"x\n") for is_error in (False, True))
        await rig.batches.add_results(BATCH, [first])
        await rig.batches.add_results(BATCH, [second, LineResult(2, True, b"y\n")])
        batch = await rig.batches.get(BATCH)
        assert batch is not None
        assert (batch.num_completed, batch.num_failed) == (1, 1)
        await rig.batches.move(BATCH, BatchEvent.CLOSE, NOW_S)
        assert (await rig.batches.cancel("", BATCH, NOW_S)) == await rig.batches.get(BATCH)


@pytest.mark.parametrize(
    "name", ["a\u00a0b", "\u6771\u4eac\u3000\u4e00", "\U0001f468\u200d\U0001f469"]
)
async def test_ids_are_any_text(tmp_path: Path, name: str) -> None:
    async with opened(tmp_path) as rig:
        await rig.add_input(line(name, "one"))
        await rig.add_batch()
        (answered,) = await rig.content((await rig.run()).output_file_id)
    assert answered["custom_id"] == name
