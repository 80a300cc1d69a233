"""Clients that leave their answers unread, over real sockets: what waits for them has a bound."""

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import trustme

from diptych.errors import DiptychError, QueueFullError, SlowClientError
from diptych.rpc.identity import Certificate
from diptych.rpc.status import from_rpc_error
from diptych.timers import Timers
from diptych.v1 import inference_pb2, inference_pb2_grpc
from router import untaken
from router.frontend.http.exchange import BodyRoom, Exchange
from router.frontend.http.posted import Answer, Posted
from router.frontend.http.server import HttpServer, bind, bounds_of
from router.untaken import Cut, Untaken
from tests import metrics
from tests.call import token_request
from tests.integration import fake_workers
from tests.integration.router_rig import PATIENT, PROMPT, eventually, failure_of, serving
from tests.integration.test_http_endings import (
    FOR_EVER,
    body_of,
    outcome,
    raw_connection,
    raw_request,
)

BODY_BYTES = 2**21
MOST = 16 * 2**20  # and a quarter of it for who is slow
SMALL_WINDOW = [
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 65536),
    ("grpc.use_local_subchannel_pool", 1),
]


async def tell(exchange: Exchange, data: bytes) -> None:
    await exchange.send_json({"said": "x" * BODY_BYTES})


async def tell_less(exchange: Exchange, data: bytes) -> None:
    await exchange.send_json({"said": "x" * 400_000})


@asynccontextmanager
async def telling(
    bound: Untaken, answer: Answer = tell, certificate: Certificate | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    """A server whose answers are large."""
    room, timers = BodyRoom(2**20, 2**20, 30.0), Timers()
    listener = bind("127.0.0.1", 0, timers)
    bounds = bounds_of(2**20, 30.0)
    server = HttpServer(Posted(answer, room), listener, bounds, bound, certificate)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve())
        url = f"http://127.0.0.1:{server.port}"
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            yield client
        await server.stop(0.1)


async def test_clients_that_read_nothing_hold_a_bounded_sum_and_no_reader_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(untaken, "SLOW_S", 0.3)
    cuts: list[Cut] = []
    bound = Untaken(asyncio.get_running_loop().time, MOST, cuts.append)
    most = 0
    async with telling(bound) as client:
        with ExitStack() as held:
            for _ in range(20):
                slow = held.enter_context(raw_connection(client))
                slow.sendall(raw_request({}))
                await asyncio.sleep(0.05)
                most = max(most, bound.num_bytes)
                read = await client.post("/", json={})
                assert len(read.json()["said"]) == BODY_BYTES
            assert len(cuts) >= 10
            assert most <= MOST
            await asyncio.sleep(0.4)
            for _ in range(2):
                assert len((await client.post("/", json={})).json()["said"]) == BODY_BYTES
            assert bound.num_bytes <= MOST // 4
            assert all(cut.since_s >= 0.3 for cut in cuts), "nobody who was not slow"
            assert all(cut.client.startswith("127.0.0.1:") and cut.request_id for cut in cuts)
        await eventually(lambda: bound.num_bytes == 0, "what nobody waits for is still counted")


async def test_what_tls_keeps_counts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer is less than uvloop's TLS would keep before it says that it is much."""
    monkeypatch.setattr(untaken, "SLOW_S", 0.1)
    issued = trustme.CA().issue_cert("127.0.0.1")
    chain, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    chain.write_bytes(issued.cert_chain_pems[0].bytes())
    key.write_bytes(issued.private_key_pem.bytes())
    cuts: list[Cut] = []
    bound = Untaken(asyncio.get_running_loop().time, 2**22, cuts.append)
    most = 0
    async with telling(bound, tell_less, Certificate("tls", chain, key)) as client:
        with ExitStack() as held:
            for _ in range(30):
                held.enter_context(await asyncio.to_thread(asking_by_tls, client))
                await asyncio.sleep(0.02)
                most = max(most, bound.num_bytes)
            assert len(cuts) >= 15
            assert 2**19 < most <= 2**22
        await eventually(lambda: bound.num_bytes == 0, "what nobody waits for is still counted")


def asking_by_tls(client: httpx.AsyncClient) -> ssl.SSLSocket:
    """What is answered is not read."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.settimeout(20)
    made.connect((client.base_url.host, client.base_url.port))
    asking = context.wrap_socket(made)
    asking.sendall(raw_request({}))
    return asking


async def test_who_reads_slowly_but_on_gets_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A portion in the time it takes to be slow, through a small window."""
    monkeypatch.setattr(untaken, "SLOW_S", 1.0)
    cuts: list[Cut] = []
    bound = Untaken(asyncio.get_running_loop().time, MOST, cuts.append)
    async with telling(bound) as client:
        with raw_connection(client) as reading, ExitStack() as held:
            reading.sendall(raw_request({}))
            num_read, loop = 0, asyncio.get_running_loop()
            while num_read < BODY_BYTES:
                piece = await loop.sock_recv(reading, 65_536)
                assert piece, "it was cut off"
                num_read += len(piece)
                if num_read % 7 == 0:
                    held.enter_context(slow_one(client))
                await asyncio.sleep(len(piece) / 2**20)
        assert cuts
        await eventually(lambda: bound.num_bytes == 0, "what nobody waits for is still counted")


async def test_who_reads_at_twice_the_safe_rate_is_not_slow_however_its_system_tells_it() -> None:
    """Time goes by what is read, so that systems' buffers alone decide, which are as usual here."""
    rate = 2 * 192 * 1024 / untaken.SLOW_S
    num_read = 0
    cuts: list[Cut] = []
    bound = Untaken(lambda: num_read / rate, 4 * 2**20, cuts.append)
    other = bound.open("other")
    async with telling(bound) as client:
        with socket.create_connection((client.base_url.host, client.base_url.port)) as reading:
            reading.setblocking(False)
            reading.sendall(raw_request({}))
            async with asyncio.timeout(20):
                while num_read < BODY_BYTES:
                    piece = await asyncio.get_running_loop().sock_recv(reading, 4096)
                    assert piece, "it was cut off"
                    num_read += len(piece)
                    await asyncio.sleep(0.001)
                    other.wait(1)  # somebody comes, for whom there may have to be room
                    other.take(1)
        assert not cuts


def slow_one(client: httpx.AsyncClient) -> socket.socket:
    made = raw_connection(client)
    made.sendall(raw_request({}))
    return made


async def test_a_stream_that_is_not_read_ends_where_too_much_waits(
    wide_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    few = {"max_untaken_bytes": 200_000, "client_buffer_messages": 10**6}
    async with serving(wide_model, tmp_path, PATIENT, **few) as (cluster, client):
        behaviour = cluster.decode[0].behaviour
        behaviour.step_s, behaviour.tokens_per_step = 0.001, 64
        with raw_connection(client) as slow, caplog.at_level(logging.WARNING, "router.untaken"):
            slow.sendall(raw_request(body_of(wide_model, FOR_EVER, stream=True)))
            await eventually(lambda: bool(cluster.decode[0].reservations), "never placed")
            await cluster.wait_free()
            assert await outcome(client, "CLIENT_TOO_SLOW") == 1
            assert await counted(client, "diptych_router_clients_cut_off_total") >= 1
            await asyncio.sleep(0.1)
            assert not (await read_all(slow)).endswith(b"0\r\n\r\n"), "it ended as if it were whole"
        (said,) = [each for each in caplog.records if each.message.startswith("a client was cut")]
        assert said.__dict__["num_bytes"] > 0
        behaviour.step_s, behaviour.tokens_per_step = 0.002, 1
        assert (await client.post("/v1/completions", json=body_of(wide_model))).status_code == 200
        assert await counted(client, 'diptych_router_untaken_bytes{bound="cut"}') == 0


async def read_all(connection: socket.socket) -> bytes:
    read = bytearray()
    with suppress(ConnectionError):
        while piece := await asyncio.get_running_loop().sock_recv(connection, 65536):
            read += piece
    return bytes(read)


async def counted(client: httpx.AsyncClient, name: str) -> float:
    return metrics.parse((await client.get("/metrics")).text)[name]


async def test_a_stream_over_grpc_that_is_not_read_ends_where_too_much_waits(
    wide_model: Path, tmp_path: Path
) -> None:
    few: dict[str, Any] = {"max_untaken_bytes": 200_000, "client_buffer_messages": 10**6}
    async with (
        serving(wide_model, tmp_path, PATIENT, **few) as (cluster, client),
        grpc.aio.insecure_channel(cluster.address, options=SMALL_WINDOW) as channel,
    ):
        behaviour = cluster.decode[0].behaviour
        behaviour.step_s, behaviour.tokens_per_step = 0.001, 64
        stub = inference_pb2_grpc.InferenceStub(channel)
        slow = stub.Generate(token_request(PROMPT, max_tokens=FOR_EVER))
        await eventually(lambda: bool(cluster.decode[0].reservations), "never placed")
        await cluster.wait_free()
        error = await failure_of(slow)
        assert isinstance(error, SlowClientError)
        assert "bytes waited for the client" in error.message
        assert await outcome(client, "CLIENT_TOO_SLOW") == 1
        assert await counted(client, 'diptych_router_untaken_bytes{bound="cut"}') == 0


async def test_single_messages_over_grpc_that_are_not_read_leave_others_room(
    wide_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One alone may fill half; what is refused then was not begun, and what was begun comes."""
    monkeypatch.setattr(fake_workers, "POOLED", [1 / (1 + each) for each in range(64)])
    asked = inference_pb2.EmbedRequest(inputs=[vector_of(30)] * 512)
    async with (
        serving(wide_model, tmp_path, PATIENT, max_untaken_bytes=200_000) as (cluster, client),
        grpc.aio.insecure_channel(cluster.address, options=SMALL_WINDOW) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(cluster.channel)
        assert len((await stub.Embed(asked)).embeddings) == 512
        streaming: Any = channel.stream_stream  # of which one message alone would be read
        unread = streaming("/diptych.v1.Inference/Embed")()
        await unread.write(asked.SerializeToString())
        await unread.done_writing()
        await asyncio.sleep(0.1)
        async with asyncio.timeout(20):  # until the answer waits
            while (refused := await refusal_of(stub, asked)) is None:
                pass
        assert isinstance(refused, QueueFullError)
        asked_before = await outcome(client, "ok")
        assert await outcome(client, "QUEUE_FULL") >= 1
        for _ in range(5):
            assert isinstance(await refusal_of(stub, asked), QueueFullError)
        assert await outcome(client, "ok") == asked_before, "it was made, and then refused"
        unread.cancel()
        async with asyncio.timeout(20):
            while await refusal_of(stub, asked) is not None:
                await asyncio.sleep(0.05)
            while await counted(client, 'diptych_router_untaken_bytes{bound="refuse"}'):
                await asyncio.sleep(0.05)  # the last call's end comes after its answer


async def refusal_of(
    stub: inference_pb2_grpc.InferenceStub, asked: inference_pb2.EmbedRequest
) -> DiptychError | None:
    try:
        answer: Any = stub.Embed(asked)
        assert len((await answer).embeddings) == 512
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    return None


def vector_of(token_id: int) -> inference_pb2.Input:
    return inference_pb2.Input(tokens=inference_pb2.TokenPrompt(ids=[token_id]))


async def test_the_best_wait_for_a_client_who_takes_them_one_by_one(
    wide_model: Path, tmp_path: Path
) -> None:
    """Over HTTP they are put into one piece as soon as they are known: none of them waits."""
    many = 400  # tokens, of which as many as are known would be too much
    async with serving(
        wide_model, tmp_path, PATIENT, max_untaken_bytes=2**16, max_concurrent=2
    ) as (cluster, client):
        body = {"model": wide_model.name, "prompt": PROMPT, "max_tokens": many, "best_of": 2}
        answer = await client.post("/v1/completions", json={**body, "ignore_eos": True})
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 2 * many

        request = token_request(PROMPT, max_tokens=many, temperature=1.0)
        request.sampling.best_of = 2
        request.sampling.logprobs = 1  # with these each token waits by itself
        stub = inference_pb2_grpc.InferenceStub(cluster.channel)
        assert isinstance(await failure_of(stub.Generate(request, timeout=20)), SlowClientError)
