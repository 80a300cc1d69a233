"""How answers over HTTP end that do not go well: drains, failures, refusals, slow readers."""

import asyncio
import gc
import json
import logging
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.frontend.http.event_stream import EventStream
from router.frontend.http.protocol import MAX_HEAD_BYTES
from router.generation.answer import Delta
from router.request.machine import RequestMachine
from router.request.response_builder import ResponseBuilder
from router.request.session import Session
from tests import metrics
from tests.integration import fake_workers
from tests.integration.router_rig import PATIENT, PROMPT, TIMERS, eventually, running, serving
from tests.waiting import within

COMPLETIONS, EMBEDDINGS = "/v1/completions", "/v1/embeddings"
FOR_EVER = 900_000  # tokens


def body_of(model: Path, max_tokens: int = 6, **settings: object) -> dict[str, Any]:
    common = {"model": model.name, "prompt": PROMPT, "max_tokens": max_tokens, "ignore_eos": True}
    return {**common, **settings}


async def outcome(client: httpx.AsyncClient, name: str) -> float:
    text = (await client.get("/metrics")).text
    return metrics.parse(text)[f'diptych_requests_total{{outcome="{name}"}}']


async def test_a_drain_refuses_what_is_new_and_lets_streams_end(
    wide_model: Path, tmp_path: Path
) -> None:
    timers = TIMERS.model_copy(update={"lame_duck_s": 0.6, "drain_s": 15.0})
    async with serving(wide_model, tmp_path, timers) as (cluster, client):
        cluster.decode[0].behaviour.step_s = 0.01
        asked = body_of(wide_model, 250, stream=True)  # longer than both of these
        async with client.stream("POST", COMPLETIONS, json=asked) as stream:
            lines = stream.aiter_lines()
            read = [await anext(lines)]
            cluster.stop.set()
            healthy = await client.get("/health")
            assert (healthy.status_code, healthy.headers["retry-after"]) == (503, "1")
            async with within(5):
                while True:
                    late = await client.post(COMPLETIONS, json=body_of(wide_model, 1))
                    if late.status_code != 200:  # within the lame duck's time it is served
                        break
            assert (late.status_code, late.headers["retry-after"]) == (503, "1")
            assert late.json()["error"]["code"] == "worker_draining"
            read += [line async for line in lines if line]
        assert read[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in read[-2]
        await asyncio.wait([cluster.served])


async def test_what_outlasts_the_drain_is_cut_off_and_told_so(
    wide_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "router")
    timers = TIMERS.model_copy(update={"lame_duck_s": 0.0, "drain_s": 0.1})
    async with serving(wide_model, tmp_path, timers) as (cluster, client), asyncio.TaskGroup() as t:
        asked = body_of(wide_model, FOR_EVER)
        whole = t.create_task(client.post(COMPLETIONS, json=asked))
        await eventually(lambda: bool(cluster.decode[0].reservations), "never placed")
        async with client.stream("POST", COMPLETIONS, json={**asked, "stream": True}) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            cluster.stop.set()
            *_, told, end = [line async for line in lines if line]
        assert json.loads(told.removeprefix("data: "))["error"]["code"] == "worker_draining"
        assert end == "data: [DONE]"
        refused = await whole
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["code"] == "worker_draining"
        await asyncio.wait([cluster.served])
    ends = [each for each in caplog.records if each.message == "request ended"]
    assert [vars(each)["outcome"] for each in ends] == ["WORKER_DRAINING"] * 2


async def test_detail_19_a_failure_amid_a_stream_is_an_event_before_its_end(
    wide_model: Path, tmp_path: Path
) -> None:
    async with serving(wide_model, tmp_path, max_attempts=1) as (cluster, client):
        asked = body_of(wide_model, FOR_EVER, stream=True)
        async with client.stream("POST", COMPLETIONS, json=asked) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            await cluster.decode[0].kill()
            read = [line async for line in lines if line]
        assert read[-1] == "data: [DONE]"
        last = json.loads(read[-2].removeprefix("data: "))
        assert set(last) == {"error"}
        assert last["error"]["code"] == "worker_lost"


async def test_pieces_of_a_stream_do_not_wait_for_its_task(
    wide_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the first; those of several choices take turns in theirs."""
    past: list[Delta] = []
    write: Callable[[EventStream[Delta], Delta], None] = EventStream[Delta].write

    def write_past(stream: EventStream[Delta], delta: Delta) -> None:
        past.append(delta)
        write(stream, delta)

    monkeypatch.setattr(EventStream, "write", write_past)
    async with serving(wide_model, tmp_path) as (_, client):
        for num_choices in (1, 2):
            asked = body_of(wide_model, 20, stream=True, n=num_choices, seed=1)
            streamed = (await client.post(COMPLETIONS, json=asked)).text.split("\n\n")
            pieces = [json.loads(each[6:])["choices"][0] for each in streamed[:-2]]
            whole = await client.post(COMPLETIONS, json={**asked, "stream": False})
            for choice in whole.json()["choices"]:
                own = [each["text"] for each in pieces if each["index"] == choice["index"]]
                assert "".join(own) == choice["text"]
            assert bool(past) == (num_choices == 1)
            past.clear()


async def test_detail_20_a_client_that_leaves_frees_everything(
    wide_model: Path, tmp_path: Path
) -> None:
    """Amid a stream, and while a whole answer is made, of which nothing has come yet."""
    async with serving(wide_model, tmp_path) as (cluster, client):
        asked = body_of(wide_model, FOR_EVER, stream=True)
        async with client.stream("POST", COMPLETIONS, json=asked) as stream:
            await anext(stream.aiter_bytes())
        await cluster.wait_free()
        assert await outcome(client, "cancelled") == 1
        async with asyncio.TaskGroup() as tasks:
            whole = client.post(COMPLETIONS, json=body_of(wide_model, FOR_EVER))
            waiting = tasks.create_task(whole)
            await eventually(lambda: bool(cluster.decode[0].reservations), "never placed")
            waiting.cancel()
        await cluster.wait_free()
        assert await outcome(client, "cancelled") == 2


async def test_no_client_that_leaves_leaves_its_session_to_the_collector(
    wide_model: Path, tmp_path: Path
) -> None:
    """A router would stop for all of many sessions at once."""
    async with serving(wide_model, tmp_path) as (cluster, client):
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for settings in ({}, {"n": 2}, {"prompt": [PROMPT, PROMPT]}):
                asked = body_of(wide_model, FOR_EVER, stream=True, **settings)
                async with client.stream("POST", COMPLETIONS, json=asked) as stream:
                    await anext(stream.aiter_bytes())
                await cluster.wait_free()
            gc.collect()
            left = Counter(type(each).__name__ for each in gc.garbage)
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        for kind in (Session, RequestMachine, ResponseBuilder):
            assert left[kind.__name__] == 0, left.most_common(30)


async def test_detail_22_health_is_good_only_while_a_request_could_be_served(
    wide_model: Path, tmp_path: Path
) -> None:
    async with serving(wide_model, tmp_path) as (cluster, client):
        assert (await client.get("/health")).status_code == 200
        await cluster.decode[0].kill()
        refused = await client.post(COMPLETIONS, json=body_of(wide_model))
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        health = await client.get("/health")
        assert (health.status_code, health.headers["retry-after"]) == (503, "1")


async def test_a_page_reads_nothing_by_a_name_that_was_made_to_lead_here(
    wide_model: Path, tmp_path: Path
) -> None:
    async with serving(wide_model, tmp_path) as (_, client):
        for path in ("/", "/v1/models", "/v1/cluster", "/metrics"):
            refused = await client.get(path, headers={"host": "evil.example:8000"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                421,
                "host_not_allowed",
            )
            named = await client.get(path, headers={"host": "localhost:8000"})
            assert named.status_code == 200


async def test_detail_21_a_full_router_says_when_to_come_back(
    wide_model: Path, tmp_path: Path
) -> None:
    async with serving(wide_model, tmp_path, max_queue=0, max_concurrent=1) as (cluster, client):
        asked = body_of(wide_model, FOR_EVER, stream=True)
        async with client.stream("POST", COMPLETIONS, json=asked) as stream:
            await anext(stream.aiter_lines())
            refused = await client.post(COMPLETIONS, json=body_of(wide_model))
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["type"] == "rate_limit_error"
        await cluster.wait_free()


async def test_a_clients_own_deadline(wide_model: Path, tmp_path: Path) -> None:
    async with serving(wide_model, tmp_path) as (cluster, client):
        late = await client.post(
            COMPLETIONS, json=body_of(wide_model, FOR_EVER), headers={"x-request-timeout": "0.3"}
        )
        assert late.status_code == 504
        assert late.json()["error"]["code"] == "deadline_exceeded"
        await cluster.wait_free()
        wrong = await client.post(
            COMPLETIONS, json=body_of(wide_model), headers={"x-request-timeout": "nan"}
        )
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "x-request-timeout")


async def test_a_trace_goes_on(wide_model: Path, tmp_path: Path) -> None:
    traceparent = f"00-{'ab' * 16}-{'cd' * 8}-01"
    async with serving(wide_model, tmp_path) as (cluster, client):
        headers = {"traceparent": traceparent}
        await client.post(COMPLETIONS, json=body_of(wide_model), headers=headers)
        assert cluster.prefill[0].traceparents == [traceparent]


async def test_a_reader_that_takes_nothing_is_given_up(wide_model: Path, tmp_path: Path) -> None:
    """Its tokens are held within the client's buffer; nobody else waits."""
    async with serving(wide_model, tmp_path, client_buffer_messages=16) as (cluster, client):
        behaviour = cluster.decode[0].behaviour
        behaviour.step_s, behaviour.tokens_per_step = 0.001, 512
        with raw_connection(client) as slow:
            slow.sendall(raw_request(body_of(wide_model, FOR_EVER, stream=True)))
            await eventually(lambda: bool(cluster.decode[0].reservations), "never placed")
            await cluster.wait_free()
            assert await outcome(client, "CLIENT_TOO_SLOW") == 1
        behaviour.step_s, behaviour.tokens_per_step = 0.002, 1
        answered = await client.post(COMPLETIONS, json=body_of(wide_model))
        assert answered.status_code == 200


@pytest.fixture
def long_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of numbers with many digits: 1.3 kB of each prompt."""
    monkeypatch.setattr(fake_workers, "POOLED", [1 / (1 + each) for each in range(64)])


async def begin_large(client: httpx.AsyncClient, slow: socket.socket, model: Path) -> bytes:
    """Ask for 0.7 MB; the head of the answer, which has begun then."""
    slow.sendall(raw_request(vectors_of(model, [[30]] * 512), EMBEDDINGS))
    head = bytearray()
    async with within(20):
        while not head.endswith(b"\r\n\r\n"):
            head += await asyncio.get_running_loop().sock_recv(slow, 1)
    assert head.startswith(b"HTTP/1.1 200"), head
    return bytes(head)


async def read_body(connection: socket.socket, head: bytes) -> tuple[bytes, int]:
    """What comes of an answer until it or its connection ends, and how long it is."""
    length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
    body = bytearray()
    async with within(20):
        with suppress(ConnectionError):
            while len(body) < length:
                piece = await asyncio.get_running_loop().sock_recv(connection, 65536)
                if not piece:
                    break
                body += piece
    return bytes(body), length


@pytest.mark.usefixtures("long_vectors")
async def test_a_large_answer_keeps_its_place_until_its_client_has_it(
    wide_model: Path, tmp_path: Path
) -> None:
    one = {"max_concurrent": 1}
    async with serving(wide_model, tmp_path, PATIENT, quota=one) as (_, client):
        with raw_connection(client) as slow:
            head = await begin_large(client, slow, wide_model)
            refused = await client.post(EMBEDDINGS, json=vectors_of(wide_model, [[30]]))
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "quota_exceeded")
            body, length = await read_body(slow, head)
            assert len(body) == length
            assert len(json.loads(body)["data"]) == 512
            await until_served(client, wide_model)
        assert await outcome(client, "ok") >= 2


@pytest.mark.usefixtures("long_vectors")
async def test_who_leaves_a_large_answer_unread_is_cut_off_and_frees_its_place(
    wide_model: Path, tmp_path: Path
) -> None:
    timers, one = PATIENT.model_copy(update={"client_write_s": 0.3}), {"max_concurrent": 1}
    async with serving(wide_model, tmp_path, timers, quota=one) as (_, client):
        with raw_connection(client) as slow:
            head = await begin_large(client, slow, wide_model)
            await until_served(client, wide_model)
            ended = await outcome(client, "CLIENT_TOO_SLOW") + await outcome(client, "cancelled")
            assert ended == 1, "by the router, or before it by the system"
            body, length = await read_body(slow, head)
            assert len(body) < length


async def until_served(client: httpx.AsyncClient, model: Path) -> None:
    async with within(20):
        while (await client.post(EMBEDDINGS, json=vectors_of(model, [[30]]))).status_code != 200:
            await asyncio.sleep(0.02)


def vectors_of(model: Path, prompts: list[list[int]]) -> dict[str, Any]:
    return {"model": model.name, "input": prompts}


async def test_a_body_that_does_not_come_and_a_head_without_end(
    wide_model: Path, tmp_path: Path
) -> None:
    timers = TIMERS.model_copy(update={"client_write_s": 0.3})
    async with serving(wide_model, tmp_path, timers) as (_, client):
        with raw_connection(client) as slow, raw_connection(client) as long:
            slow.sendall(raw_request(body_of(wide_model))[:-5])
            long.sendall(b"GET /health HTTP/1.1\r\nx: " + b"x" * (MAX_HEAD_BYTES + 1))
            for connection, status in ((slow, b"408"), (long, b"400")):
                async with within(5):
                    answer = await asyncio.get_running_loop().sock_recv(connection, 4096)
                assert answer.startswith(b"HTTP/1.1 " + status), answer
        assert (await client.get("/health")).status_code == 200


def raw_connection(client: httpx.AsyncClient) -> socket.socket:
    """With a small window, from which nothing is read but by hand."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.connect((client.base_url.host, client.base_url.port))
    made.setblocking(False)
    return made


def raw_request(body: dict[str, Any], path: str = COMPLETIONS) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


def test_a_taken_port_is_one_line_that_names_the_setting(wide_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        flags = ["--model", str(wide_model), "--decode", "127.0.0.1:1", "--http-port", str(port)]
        done = subprocess.run(
            [sys.executable, "-m", "router", *flags], capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    said = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert said == [
        f"diptych router: --http-port: cannot bind 127.0.0.1:{port}: Address already in use; "
        "0 picks a free port, --no-http serves gRPC alone"
    ]


async def test_it_can_be_off(wide_model: Path, tmp_path: Path) -> None:
    ports = tmp_path / "ports.json"
    async with running(wide_model, 1, 1, port_file=ports):
        assert "http_address" not in json.loads(ports.read_text())
