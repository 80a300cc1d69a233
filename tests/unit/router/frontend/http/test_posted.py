"""A route's shell over plain ASGI: bounded reading, errors in their place, no work for nobody."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from diptych.errors import NoWorkerError, QueueFullError
from router.frontend.http import json_parts
from router.frontend.http.exchange import BodyRoom, Exchange
from router.frontend.http.posted import Answer, Posted

ROOM = BodyRoom(max_bytes=100, max_all_bytes=150, patience_s=30.0, free_bytes=0)
JSON = [(b"content-type", b"application/json; charset=utf-8")]


class Call:
    """One call of a route; ``pieces`` of its body come at once, then the client only listens."""

    def __init__(
        self,
        answer: Answer,
        pieces: Sequence[bytes],
        headers: Sequence[tuple[bytes, bytes]] = JSON,
        room: BodyRoom = ROOM,
    ) -> None:
        self.sent: list[dict[str, Any]] = []
        self.left = asyncio.Event()
        self.num_read = 0
        self.more_comes = False
        """Whether the client says that its pieces are not all."""
        self._pieces = list(pieces)
        self._route = Posted(answer, room)
        self._scope = {"type": "http", "headers": list(headers)}

    async def run(self) -> None:
        await self._route(self._scope, self._receive, self._send)  # type: ignore[arg-type]

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])

    @property
    def is_whole(self) -> bool:
        return not self.sent[-1]["more_body"]

    async def _receive(self) -> dict[str, Any]:
        if self._pieces:
            self.num_read += 1
            body = self._pieces.pop(0)
            return {
                "type": "http.request",
                "body": body,
                "more_body": self.more_comes or bool(self._pieces),
            }
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)


async def echo(exchange: Exchange, data: bytes) -> None:
    await exchange.send_json({"said": data.decode()})


async def test_a_body_may_come_in_chunks() -> None:
    call = Call(echo, [b"{", b"}"], [*JSON, (b"transfer-encoding", b"Chunked")])
    await call.run()
    assert call.status == 200


async def test_an_answer() -> None:
    call = Call(echo, [b"{", b"}"], [*JSON, (b"x-request-id", b"mine")])
    await call.run()
    assert (call.status, json.loads(call.body)) == (200, {"said": "{}"})
    assert call.headers[b"content-length"] == str(len(call.body)).encode()
    assert call.headers[b"x-request-id"] == b"mine"


@pytest.mark.parametrize(
    ("given", "said"),
    [("ü-À-界".encode(), "ü-À-界"), ("ü".encode("latin-1"), "ü")],
    ids=["as UTF-8", "as Latin-1"],
)
async def test_an_answer_says_the_same_id_in_its_header_and_in_its_body(
    given: bytes, said: str
) -> None:
    async def tell(exchange: Exchange, data: bytes) -> None:
        await exchange.send_json({"id": exchange.request_id})

    call = Call(tell, [b"{}"], [*JSON, (b"x-request-id", given)])
    await call.run()
    assert (call.status, json.loads(call.body)) == (200, {"id": said})
    assert call.headers[b"x-request-id"] == given


@pytest.mark.parametrize(
    ("headers", "pieces", "status", "num_read"),
    [
        ([], [b"{}"], 415, 0),
        ([(b"content-type", b"text/plain")], [b"{}"], 415, 0),
        ([*JSON, (b"content-encoding", b"gzip")], [b"{}"], 415, 0),
        ([*JSON, (b"transfer-encoding", b"gzip, chunked")], [b"{}"], 501, 0),
        ([*JSON, *[(b"transfer-encoding", each) for each in (b"gzip", b"chunked")]], [b""], 501, 0),
        ([*JSON, (b"content-length", b"101")], [b"x" * 101], 413, 0),
        (JSON, [b"x" * 60] * 9, 413, 2),
        ([*JSON, (b"x-request-id", b"a b")], [b"{}"], 400, 0),
        ([*JSON, (b"x-request-id", b"")], [b"{}"], 400, 0),
    ],
)
async def test_what_is_refused_is_not_read_to_its_end(
    headers: list[tuple[bytes, bytes]], pieces: list[bytes], status: int, num_read: int
) -> None:
    call = Call(echo, pieces, headers)
    await call.run()
    assert (call.status, call.num_read) == (status, num_read)
    assert set(json.loads(call.body)) == {"error"}


async def test_a_body_may_say_that_it_comes_as_it_is() -> None:
    call = Call(echo, [b"{}"], [*JSON, (b"content-encoding", b"Identity")])
    await call.run()
    assert call.status == 200


async def test_bodies_that_are_being_read_have_a_budget() -> None:
    ROOM.acquire(100, 0)
    refused = Call(echo, [b" " * 50, b"{"])
    await refused.run()
    assert (refused.status, refused.headers[b"retry-after"]) == (429, b"1")
    ROOM.acquire(50, 100)  # what it had read takes no room any more
    with pytest.raises(QueueFullError):
        ROOM.acquire(1, 150)
    ROOM.release(150)
    served = Call(echo, [b"{}"])
    await served.run()
    assert served.status == 200


async def test_large_bodies_that_stop_midway_keep_out_no_small_one() -> None:
    room = BodyRoom(max_bytes=100, max_all_bytes=150, patience_s=30.0, free_bytes=20)
    large = [Call(echo, [b" " * 95], room=room) for _ in range(2)]
    async with asyncio.TaskGroup() as tasks:
        for call in large:
            call.more_comes = True
            tasks.create_task(call.run())
        await asyncio.sleep(0)
        small = Call(echo, [b"{", b"}" * 19], room=room)
        await small.run()
        larger = Call(echo, [b"{", b"}" * 20], room=room)
        await larger.run()
        assert (small.status, larger.status) == (200, 429)
        for call in large:
            call.left.set()
    room.acquire(150, 20)  # all that there is, again


@pytest.mark.parametrize("length", [[], [(b"content-length", b"100")]])
async def test_what_has_not_come_takes_no_room(length: list[tuple[bytes, bytes]]) -> None:
    """Ten clients announce much and send little; their neighbour is served."""
    idle = [Call(echo, [b" "], [*JSON, *length]) for _ in range(10)]
    async with asyncio.TaskGroup() as tasks:
        for call in idle:
            call.more_comes = True
            tasks.create_task(call.run())
        await asyncio.sleep(0)
        served = Call(echo, [b"{}"])
        await served.run()
        assert served.status == 200
        for call in idle:
            call.left.set()


async def test_detail_20_the_work_ends_when_the_client_leaves() -> None:
    was_cancelled = False

    async def never(exchange: Exchange, data: bytes) -> None:
        nonlocal was_cancelled
        try:
            call.left.set()
            await asyncio.Event().wait()
        finally:
            was_cancelled = True

    call = Call(never, [b"{}"])
    await call.run()
    assert was_cancelled
    assert call.sent == []


async def test_a_client_that_leaves_amid_its_body_is_forgotten() -> None:
    call = Call(echo, [])
    call.left.set()
    await call.run()
    assert call.sent == []


async def test_who_is_cut_off_by_a_drain_is_told_so() -> None:
    async def never(exchange: Exchange, data: bytes) -> None:
        await asyncio.Event().wait()

    call = Call(never, [b"{}"])
    await cut_off(call)
    assert (call.status, call.headers[b"retry-after"], call.is_whole) == (503, b"1", True)
    assert json.loads(call.body)["error"]["code"] == "worker_draining"


async def test_a_stream_that_is_cut_off_by_a_drain_ends_with_an_event() -> None:
    async def stream(exchange: Exchange, data: bytes) -> None:
        await exchange.send_piece(b"data: 1\n\n")
        await asyncio.Event().wait()

    call = Call(stream, [b"{}"])
    await cut_off(call)
    _, told, last, _ = call.body.decode().split("\n\n")
    assert json.loads(told.removeprefix("data: "))["error"]["code"] == "worker_draining"
    assert (last, call.is_whole) == ("data: [DONE]", True)


async def test_a_drain_adds_nothing_to_an_answer_that_is_complete() -> None:
    async def answer(exchange: Exchange, data: bytes) -> None:
        await exchange.send_json({})
        await asyncio.Event().wait()

    call = Call(answer, [b"{}"])
    await cut_off(call)
    assert (call.status, call.body) == (200, b"{}")


async def cut_off(call: Call) -> None:
    """Cancel the call, as the server does, once its answer is under way."""
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(call.run())
        for _ in range(5):
            await asyncio.sleep(0)
        running.cancel()
    assert running.cancelled()


@pytest.mark.parametrize("given", ["0", "-1", "nan", "inf", "1000001", "soon"])
async def test_a_time_that_is_none_is_refused(given: str) -> None:
    async def answer(exchange: Exchange, data: bytes) -> None:
        await exchange.send_json({"deadline_s": exchange.read_deadline_s()})

    call = Call(answer, [b"{}"], [*JSON, (b"x-request-timeout", given.encode())])
    await call.run()
    assert (call.status, json.loads(call.body)["error"]["param"]) == (400, "x-request-timeout")


async def test_of_a_bug_only_an_id_is_told(caplog: pytest.LogCaptureFixture) -> None:
    async def crash(exchange: Exchange, data: bytes) -> None:
        raise KeyError("secret")

    call = Call(crash, [b"{}"])
    await call.run()
    assert call.status == 500
    assert b"secret" not in call.body
    request_id = call.headers[b"x-request-id"].decode()
    assert request_id in json.loads(call.body)["error"]["message"]
    (record,) = caplog.records
    assert record.exc_info is not None
    assert vars(record)["request"] == request_id


async def test_detail_19_a_failure_amid_a_stream_is_an_event_before_its_end() -> None:
    async def fail(exchange: Exchange, data: bytes) -> None:
        await exchange.send_piece(b"data: 1\n\n")
        raise NoWorkerError("gone")

    call = Call(fail, [b"{}"])
    await call.run()
    assert call.status == 200
    assert call.headers[b"x-accel-buffering"] == b"no", "proxies shall hold nothing back"
    first, told, last, rest = call.body.decode().split("\n\n")
    assert (first, last, rest, call.is_whole) == ("data: 1", "data: [DONE]", "", True)
    assert json.loads(told.removeprefix("data: "))["error"]["code"] == "no_worker"


async def test_other_tasks_run_while_a_large_answer_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A list that is one longer than a round number too."""
    longest = 0
    real = json_parts.encode

    def encode(content: object) -> str:
        nonlocal longest
        text = real(content)
        longest = max(longest, len(text))
        return text

    text = 'é"\u2028' * 30_000
    vectors = [[index / 7] * (2049 + index) for index in range(70)]
    content = {"é\u2028": text, "data": [{"index": 1, "embedding": each} for each in vectors]}
    in_one_go = json_parts.encode(content).encode()
    monkeypatch.setattr(json_parts, "encode", encode)
    call = Call(lambda exchange, data: exchange.send_json(content), [b"{}"])
    num_turns = 0
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(call.run(), name="call")
        while not running.done():
            num_turns += 1
            await asyncio.sleep(0)
    assert json.loads(call.body) == content
    assert call.body == in_one_go
    assert longest < 32_768, "nothing is written in one go that takes long"
    assert num_turns > len(call.body) // 65_536
