"""What routers answer to lines: whom it slows down, and what is a line's own matter."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from batch_server.records import Batch, Line, LineOwner
from batch_server.runner import batch_run
from batch_server.runner.answers import Answer, read_retry_after_s
from batch_server.runner.batch_run import BatchRun
from batch_server.runner.input_file import Found, InputFile
from batch_server.runner.line_check import LineCheck, LineMaker
from batch_server.runner.line_splitter import RawLine
from batch_server.runner.pace import Pace
from batch_server.runner.sender import AnswerBounds, LineSender
from batch_server.runner.slots import Slots
from batch_server.status import BatchStatus
from batch_server.store.batches import BatchStore
from tests.unit.batch_server.rig import BATCH, CHAT, ROUTERS, FakeRouters, Rig, line, opened, well

NAMES = [f"line {number}" for number in range(8)]
EIGHT = b"".join(line(name, name) for name in NAMES)
MAX_CONCURRENT = 4


def refusing(status: int, code: str = "", *, to: str = "line 0", times: int = 1) -> FakeRouters:
    """Refuses one line so many times, and answers all others well."""
    left = [None] * times

    def answering(request: httpx.Request) -> httpx.Response:
        if to in request.content.decode() and left:
            left.pop()
            error = {"error": {"code": code}}
            return httpx.Response(status, headers={"retry-after": "7"}, json=error)
        return well(request)

    return FakeRouters(answering)


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (401, "invalid_api_key"),
        (429, ""),
        (429, "queue_full"),
        (429, "queue_timeout"),
        (502, ""),
        (503, ""),
        (503, "no_worker"),
        (503, "worker_draining"),
    ],
)
async def test_a_router_without_room_is_left_alone_by_all_lines(status: int, code: str) -> None:
    """Time goes on while all lines wait; the pause of the one that was refused takes none."""
    now_s, asked_s = 0.0, list[float]()
    is_judged = asyncio.Event()

    class Slow(FakeRouters):
        async def __call__(self, request: httpx.Request) -> httpx.Response:
            asked_s.append(now_s)
            if "line 0" not in request.content.decode():
                await is_judged.wait()
            return await super().__call__(request)

    async def pause(pause_s: float) -> None:
        is_judged.set()
        await asyncio.sleep(0)

    async def answer_to(name: str) -> Answer:
        body: bytes = json.dumps({"messages": name, "seed": 1}).encode()

        async def read_body() -> bytes:
            return body

        try:
            return await sender.answer(LineOwner("", BATCH), CHAT, name, read_body)
        finally:
            is_judged.set()

    async def wait(pause_s: float) -> None:
        nonlocal now_s
        now_s += pause_s
        await asyncio.sleep(0)

    slots = Slots(Pace(MAX_CONCURRENT), lambda: now_s, wait)
    routers = Slow(refusing(status, code).answering)
    async with httpx.AsyncClient(transport=httpx.MockTransport(routers)) as client:
        sender = LineSender(client, ROUTERS, slots, 1, sleep=pause, clock=lambda: now_s)
        async with asyncio.TaskGroup() as tasks:
            made = [tasks.create_task(answer_to(name), name=name) for name in NAMES]
    assert [each.result().status for each in made] == [200] * 8
    assert len(asked_s) == 9
    num_before = sum(each_s < 7 for each_s in asked_s)
    assert num_before <= MAX_CONCURRENT, "those that were with the routers already"


async def test_lines_that_one_router_failed_together_turn_to_the_next_together() -> None:
    hosts: list[str] = []
    are_two = asyncio.Event()

    async def answering(request: httpx.Request) -> httpx.Response:
        hosts.append(request.url.host)
        if len(hosts) == 2:
            are_two.set()
        await are_two.wait()
        if request.url.host == "a":
            raise httpx.ConnectError("refused")
        return well(request)

    async def at_once(pause_s: float) -> None:
        await asyncio.sleep(0)

    async def read_body() -> bytes:
        return json.dumps({"messages": "line", "seed": 1}).encode()

    slots = Slots(Pace(2), lambda: 0.0, at_once)
    async with httpx.AsyncClient(transport=httpx.MockTransport(answering)) as client:
        sender = LineSender(client, ROUTERS, slots, 1, sleep=at_once, clock=lambda: -99.0)
        async with asyncio.TaskGroup() as tasks:
            for name in NAMES[:2]:
                tasks.create_task(sender.answer(LineOwner("", BATCH), CHAT, name, read_body))
    assert hosts == ["a", "a", "b", "b"]


@pytest.mark.parametrize("code", ["deadline_unreachable", "quota_exceeded"])
async def test_what_a_line_asks_for_slows_no_other(tmp_path: Path, code: str) -> None:
    routers = refusing(429, code, times=5)
    async with opened(tmp_path, routers, max_concurrent=MAX_CONCURRENT, max_attempts=1) as rig:
        await rig.add_input(EIGHT)
        await rig.add_batch(expires_s=rig.clock_s + 3600)
        batch = await rig.run()
        assert rig.slots.pace.limit == MAX_CONCURRENT
        assert rig.slots.pace.pause_s(rig.clock_s) == float("-inf"), "nobody was told to wait"
        assert min(rig.pauses) >= 7
    assert (batch.num_completed, batch.num_failed) == (8, 0)
    assert len({request.url.host for request in routers.asked}) == 1


async def test_a_line_that_would_be_late_at_any_time_is_not_sent_again(tmp_path: Path) -> None:
    error = {"error": {"code": "deadline_unreachable"}}

    def answering(request: httpx.Request) -> httpx.Response:
        is_late = "line 0" in request.content.decode()
        return httpx.Response(429, json=error) if is_late else well(request)

    routers = FakeRouters(answering)
    async with opened(tmp_path, routers, max_concurrent=MAX_CONCURRENT) as rig:
        await rig.add_input(EIGHT)
        await rig.add_batch(expires_s=rig.clock_s + 3600)
        batch = await rig.run()
        assert rig.slots.pace.limit == MAX_CONCURRENT
        [late] = await rig.content(batch.error_file_id)
    assert (batch.num_completed, batch.num_failed) == (7, 1)
    assert late["response"]["status_code"] == 429
    assert late["response"]["body"] == error
    assert len(routers.asked) == 8


@pytest.mark.parametrize("status", [400, 403, 404, 413])
async def test_what_is_wrong_with_a_line_is_its_result(tmp_path: Path, status: int) -> None:
    routers = refusing(status, "a_reason", times=99)
    async with opened(tmp_path, routers, max_concurrent=MAX_CONCURRENT) as rig:
        await rig.add_input(EIGHT)
        await rig.add_batch()
        batch = await rig.run()
        (refused,) = await rig.content(batch.error_file_id)
        assert rig.slots.pace.limit == MAX_CONCURRENT
    assert (batch.num_completed, batch.num_failed) == (7, 1)
    assert refused["response"]["status_code"] == status
    assert len(routers.asked) == 8


@pytest.mark.parametrize("status", [307, 400, 404, 405, 421, 501])
async def test_what_answers_in_a_routers_place_for_a_while_is_no_result(
    tmp_path: Path, status: int
) -> None:
    """A proxy's page, say, while routers start again."""
    num_left = 3

    def answering(request: httpx.Request) -> httpx.Response:
        nonlocal num_left
        num_left -= 1
        return well(request) if num_left < 0 else httpx.Response(status, content=b"<html>")

    async with opened(tmp_path, FakeRouters(answering), max_concurrent=1, max_attempts=4) as rig:
        await rig.add_input(EIGHT)
        await rig.add_batch(expires_s=rig.clock_s + 3600)
        batch = await rig.run()
    assert (batch.num_completed, batch.num_failed) == (8, 0)


async def test_a_line_that_ends_workers_is_sent_a_few_times_and_slows_no_other(
    tmp_path: Path,
) -> None:
    routers = refusing(503, "worker_lost", times=99)
    async with opened(tmp_path, routers, max_concurrent=MAX_CONCURRENT, max_attempts=5) as rig:
        await rig.add_input(EIGHT)
        await rig.add_batch(expires_s=rig.clock_s + 3600)
        batch = await rig.run()
        (failed,) = await rig.content(batch.error_file_id)
        assert rig.slots.pace.limit == MAX_CONCURRENT
    assert (batch.num_completed, batch.num_failed) == (7, 1)
    assert failed["response"]["status_code"] == 503
    assert len(routers.asked) == 7 + 5


async def test_lines_beside_one_that_ends_workers_are_answered(tmp_path: Path) -> None:
    """All that are with the routers together die together, and come back together."""
    under_way: set[str] = set()
    gone: set[str] = set()

    class Together(FakeRouters):
        async def __call__(self, request: httpx.Request) -> httpx.Response:
            name = request.content.decode()
            self.asked.append(request)
            under_way.add(name)
            for _ in range(200):  # until those that come back together are all there
                await asyncio.sleep(0)
            if any("line 0" in each for each in under_way):
                gone.update(under_way)
            under_way.discard(name)
            if name not in gone:
                return well(request)
            gone.discard(name)
            return httpx.Response(503, json={"error": {"code": "worker_lost"}})

    routers = Together()
    async with opened(tmp_path, routers, max_concurrent=MAX_CONCURRENT, max_attempts=3) as rig:
        await rig.add_input(EIGHT)
        await rig.add_batch(expires_s=rig.clock_s + 3600)
        batch = await rig.run()
        (failed,) = await rig.content(batch.error_file_id)
    assert (failed["custom_id"], batch.num_completed) == ("line 0", 7)


@pytest.mark.parametrize("status", [408, 500, 504])
async def test_what_fails_is_tried_again_a_few_times(tmp_path: Path, status: int) -> None:
    routers = refusing(status, times=99)
    async with opened(tmp_path, routers, max_attempts=3) as rig:
        await rig.add_input(EIGHT)
        await rig.add_batch()
        batch = await rig.run()
        (failed,) = await rig.content(batch.error_file_id)
    assert failed["response"]["status_code"] == status
    assert len(routers.asked) == 7 + 3


def drip() -> httpx.Response:
    async def pieces() -> AsyncIterator[bytes]:
        yield b'{"choices": ['
        await asyncio.Event().wait()

    return httpx.Response(200, content=pieces())


def endless() -> httpx.Response:
    async def pieces() -> AsyncIterator[bytes]:
        while True:
            yield b" " * 1000

    return httpx.Response(200, content=pieces())


def of(content: bytes) -> Callable[[], httpx.Response]:
    return lambda: httpx.Response(200, content=content)


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (of(b"<html>sign in</html>"), "internal"),
        (of(b'{"choices": ['), "internal"),
        (of(b'{"choices": NaN}'), "internal"),
        (of(b"[]"), "internal"),
        (of(b""), "internal"),
        (endless, "answer_too_large"),
        (drip, "timeout"),
    ],
)
async def test_a_good_status_is_not_enough(
    tmp_path: Path, answer: Callable[[], httpx.Response], code: str
) -> None:
    routers = FakeRouters(lambda request: answer())
    bounds = AnswerBounds(max_bytes=10_000, timeout_s=0.05 if answer is drip else 60.0)
    async with opened(tmp_path, routers, max_attempts=3, answers=bounds) as rig:
        await rig.add_input(line("a", "one"))
        await rig.add_batch()
        batch = await rig.run()
        (failed,) = await rig.content(batch.error_file_id)
    assert (batch.num_completed, batch.num_failed) == (0, 1)
    assert failed["response"]["body"]["error"]["code"] == code
    assert len(routers.asked) == 3


async def test_a_page_with_an_error_is_told_as_one(tmp_path: Path) -> None:
    routers = FakeRouters(lambda request: httpx.Response(404, content=b"<html>"))
    async with opened(tmp_path, routers) as rig:
        await rig.add_input(line("a", "one"))
        await rig.add_batch()
        (failed,) = await rig.content((await rig.run()).error_file_id)
    assert failed["response"]["status_code"] == 404
    assert failed["response"]["body"]["error"]["message"] == "the answer is not JSON"


async def test_an_answer_of_several_lines_becomes_one(tmp_path: Path) -> None:
    content = json.dumps({"text": "a\nb", "n": [1, 2]}, indent=1).replace("\n", "\r\n").encode()
    async with opened(tmp_path, FakeRouters(lambda request: of(content)())) as rig:
        await rig.add_input(line("a", "one"))
        await rig.add_batch()
        (answered,) = await rig.content((await rig.run()).output_file_id)
    assert answered["response"]["body"] == json.loads(content)


async def test_a_window_that_ends_amid_the_lines_keeps_what_was_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the clock of the wall: the machine may have slept since the batch began."""

    class Hanging(FakeRouters):
        async def __call__(self, request: httpx.Request) -> httpx.Response:
            if len(self.asked) == 4:
                rig.clock_s += 3600
                await asyncio.Event().wait()
            return await super().__call__(request)

    monkeypatch.setattr(batch_run, "_LOOK_S", 0.01)
    async with opened(tmp_path, Hanging(), max_concurrent=1) as rig:
        await rig.add_input(EIGHT)
        await rig.add_batch(expires_s=rig.clock_s + 3600)
        batch = await rig.run()
        output = await rig.content(batch.output_file_id)
        errors = await rig.content(batch.error_file_id)
        assert rig.slots.num_taken == 0
    assert (batch.status, batch.num_completed, batch.num_failed) == (BatchStatus.EXPIRED, 4, 4)
    assert [each["error"]["code"] for each in errors] == ["batch_expired"] * 4
    assert sorted(each["custom_id"] for each in [*output, *errors]) == NAMES


async def run_all(rig: Rig, names: Sequence[str]) -> Sequence[Batch]:
    """Batches of the same file, together, and what became of them."""
    for name in names:
        await rig.add_batch(name)
    async with asyncio.TaskGroup() as tasks:
        for name in names:
            tasks.create_task(BatchRun(name, rig.needs).run(), name=name)
    return await rig.batches.page("", None, len(names))


async def test_only_lines_that_are_sent_have_their_bodies_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, most_held, found = 0, 0, list[Line]()
    body, unanswered = BatchStore.body, BatchStore.unanswered

    async def counted_body(self: BatchStore, batch_id: str, number: int) -> bytes:
        nonlocal held, most_held
        held += 1
        most_held = max(held, most_held)
        return await body(self, batch_id, number)

    async def counted(self: BatchStore, batch_id: str, rank: int, limit: int) -> list[Line]:
        lines = list(await unanswered(self, batch_id, rank, limit))
        found.extend(lines)
        return lines

    def answering(request: httpx.Request) -> httpx.Response:
        nonlocal held
        held -= 1
        return well(request)

    monkeypatch.setattr(BatchStore, "body", counted_body)
    monkeypatch.setattr(BatchStore, "unanswered", counted)
    async with opened(tmp_path, FakeRouters(answering), max_concurrent=2) as rig:
        await rig.add_input(EIGHT)
        await run_all(rig, [f"batch_{number}" for number in range(4)])
    assert 0 < most_held <= 2
    assert len(found) == 4 * len(NAMES)
    assert not any(each.body for each in found)


async def test_two_files_are_read_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_read, most_read = 0, 0
    check = InputFile.check

    async def counted(self: InputFile) -> Found:
        nonlocal num_read, most_read
        num_read += 1
        most_read = max(num_read, most_read)
        try:
            return await check(self)
        finally:
            num_read -= 1

    monkeypatch.setattr(InputFile, "check", counted)
    async with opened(tmp_path) as rig:
        await rig.add_input(EIGHT)
        ended = await run_all(rig, [f"batch_{number}" for number in range(5)])
    assert {batch.num_completed for batch in ended} == {8}
    assert 0 < most_read <= 2


async def test_one_that_waits_to_be_read_is_cancelled_at_once(tmp_path: Path) -> None:
    async with opened(tmp_path) as rig:
        await rig.add_input(EIGHT)
        await rig.add_batch()
        place = rig.needs.checks.place
        async with place("a"), place("b"), asyncio.TaskGroup() as tasks:
            tasks.create_task(rig.one.run(), name="run")
            await rig.batches.cancel("", BATCH, rig.clock_s)
            rig.one.look()
        assert (await rig.get()).status is BatchStatus.CANCELLED


def test_a_pace_comes_back_with_answers() -> None:
    pace = Pace(8)
    pace.refused(now_s=0.0, pause_s=5.0)
    pace.refused(now_s=1.0, pause_s=1.0)
    assert (pace.limit, pace.pause_s(1.0)) == (4, 4.0), "what was sent together halves once"
    pace.refused(now_s=6.0, pause_s=1.0)
    assert pace.limit == 2
    limits = []
    for _ in range(40):
        pace.answered()
        limits.append(pace.limit)
    assert limits == sorted(limits)
    assert set(limits) == set(range(2, 9)), "one more at a time, up to where it began"
    assert limits.index(4) - limits.index(3) == 3, "one more for each round"


@pytest.mark.parametrize("seed", [None, -1])
def test_a_line_without_a_seed_or_with_the_one_that_is_none_is_given_one(seed: int | None) -> None:
    read = LineCheck(CHAT).read(RawLine(1, line("a", "x", seed=seed)))
    assert json.loads(LineMaker(CHAT, "", lambda: 7).make(read, 0).body)["seed"] == 7


def test_what_is_sent_is_no_longer_than_the_line() -> None:
    """A router takes bodies up to as many bytes."""
    body = {"messages": [{"role": "user", "content": "漢字" * 1000}]}
    told = {"custom_id": "a", "method": "POST", "url": CHAT, "body": body}
    raw = RawLine(1, json.dumps(told, ensure_ascii=False).encode())
    made = LineMaker(CHAT, "").make(LineCheck(CHAT).read(raw), 0)
    assert len(made.body) < len(raw.data)
    assert json.loads(made.body)["messages"] == body["messages"]


@pytest.mark.parametrize("said", [{}, {"priority": 0}, {"priority": None}, {"priority": "batch"}])
def test_every_line_is_of_the_class_batch(said: dict[str, Any]) -> None:
    """Other servers' number for no priority too."""
    raw = RawLine(1, line("a", "x", **said))
    made = LineMaker(CHAT, "").make(LineCheck(CHAT).read(raw), 0)
    assert json.loads(made.body)["priority"] == "batch"


def test_tenants_and_their_salts_are_kept_apart() -> None:
    def salt(tenant: str, **said: Any) -> str | None:
        raw = RawLine(1, line("a", "x", **said))
        made = LineMaker(CHAT, tenant).make(LineCheck(CHAT).read(raw), 0)
        found: str | None = json.loads(made.body).get("cache_salt")
        return found

    assert salt("") is None
    assert salt("", cache_salt="s") == "s"
    assert salt("a") == salt("a", cache_salt=None)
    assert len({salt("a"), salt("b"), salt("a", cache_salt="s"), salt("a", cache_salt="t")}) == 4


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("5", 5.0), ("1e9", 300.0), ("-1", 0.0), ("nan", 0.0), ("inf", 0.0), (None, 0.0),
     ("Wed, 21 Oct 2026 07:28:00 GMT", 0.0)],
)  # fmt: skip
def test_no_router_is_left_alone_for_ever(header: str | None, seconds: float) -> None:
    assert read_retry_after_s(header) == seconds


async def test_what_readers_of_text_take_for_the_end_of_a_line_is_escaped(tmp_path: Path) -> None:
    text = "a\u2028b\u2029c\u0085d"
    content = json.dumps({"text": text}, ensure_ascii=False).encode()
    async with opened(tmp_path, FakeRouters(lambda request: of(content)())) as rig:
        await rig.add_input(line("a", "one"))
        await rig.add_batch()
        file = await rig.files.find("", (await rig.run()).output_file_id or "")
        assert file is not None
        ((_, written),) = await rig.files.results_after(file, 0)
    (only,) = written.decode().splitlines()
    assert json.loads(only)["response"]["body"]["text"] == text
