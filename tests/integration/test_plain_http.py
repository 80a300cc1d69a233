"""What plain clients of the HTTP API send, through a real cluster."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.cluster import Cluster, running_cluster
from tests.integration.http_calls import body_of

MAX_LEN = 600

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def cluster(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(
        tmp_path_factory.mktemp("plain"),
        str(tiny_llama),
        worker_flags={"num-blocks": "128", "max-model-len": str(MAX_LEN)},
    ) as running:
        yield running


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> str:
    return tiny_llama.name


async def test_http_1_0_gets_a_stream_without_chunks(
    http: httpx.AsyncClient, cluster: Cluster, model: str
) -> None:
    body = json.dumps(body_of(model, stream=True)).encode()
    host, _, port = cluster.router.http_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(f"POST /v1/completions HTTP/1.0\r\n{head}".encode() + body)
    told, _, events = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert b"transfer-encoding" not in told
    first, *_, done, nothing = events.decode().split("\n\n")
    assert json.loads(first.removeprefix("data: "))["model"] == model
    assert (done, nothing) == ("data: [DONE]", "")


async def test_what_a_long_text_becomes_can_be_read_again(
    http: httpx.AsyncClient, cluster: Cluster
) -> None:
    """No answer follows it, for which the context would have to leave room."""
    text = "bright " * MAX_LEN
    tokens = (await http.post("/tokenize", json={"prompt": text})).json()["tokens"]
    assert len(tokens) > MAX_LEN
    assert (await http.post("/detokenize", json={"tokens": tokens})).json() == {"prompt": text}
    again = (await http.post("/tokenize", json={"prompt": tokens})).json()
    assert again["count"] == len(tokens)
    async with cluster.client() as grpc:
        assert await grpc.tokenize(text) == tokens
        assert await grpc.detokenize(tokens) == text
    for path, name in (("/tokenize", "prompt"), ("/detokenize", "tokens")):
        wrong = await http.post(path, json={name: [100_000]})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, f"{name}[0]")


async def test_a_path_that_is_not_there_leads_nowhere_else(
    http: httpx.AsyncClient, model: str
) -> None:
    """Behind a proxy that ends TLS a client would be led to http, and say all in the clear."""
    for path in ("/v1/completions/", "/v1/chat/completions/"):
        missing = await http.post(path, json=body_of(model))
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    assert (await http.get("/health/")).status_code == 404
