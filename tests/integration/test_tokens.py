"""Tokenize and Detokenize, and what is declared but not served, over real gRPC."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from google.protobuf.message import Message

from diptych.client import BlockingClient, DiptychClient, build_request
from diptych.errors import (
    DiptychError,
    InvalidRequestError,
    ModelNotFoundError,
    NotServedError,
)
from diptych.rpc.status import from_rpc_error
from diptych.v1 import inference_pb2, inference_pb2_grpc
from diptych.v1.inference_pb2 import DetokenizeRequest, TokenizeRequest
from router.frontend.grpc import SERVICE
from tests.integration.router_rig import Cluster, running

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "hello there"
TURNS = (("user", "hello"), ("assistant", "there"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(wide_model: Path) -> AsyncIterator[Cluster]:
    async with running(wide_model, 1, 1, max_request_bytes=65536) as up:
        yield up


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(cluster: Cluster) -> AsyncIterator[DiptychClient]:
    async with DiptychClient(cluster.address) as opened:
        yield opened


async def refusal(cluster: Cluster, method: str, request: Message) -> DiptychError:
    """How a method refuses a request."""
    call = cluster.channel.unary_unary(
        f"/{SERVICE}/{method}", request_serializer=None, response_deserializer=None
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(request.SerializeToString())
    return from_rpc_error(caught.value)


async def prompt_ids(cluster: Cluster, request: inference_pb2.GenerateRequest) -> list[int]:
    """What Generate makes of a request's prompt."""
    request.return_prompt_token_ids = True
    request.sampling.max_tokens = 1
    call = inference_pb2_grpc.InferenceStub(cluster.channel).Generate(request)
    responses = [response async for response in call]
    return list(responses[0].started.prompt_token_ids)


async def test_a_text_has_the_tokens_that_generate_computes(
    cluster: Cluster, client: DiptychClient
) -> None:
    token_ids = await client.tokenize(TEXT)
    assert token_ids == await prompt_ids(cluster, build_request(TEXT))
    assert await client.detokenize(token_ids) == TEXT
    assert await client.detokenize([2, *token_ids]) == TEXT
    kept = await client.detokenize([2, *token_ids], keep_special_tokens=True)
    assert kept == f"<eos>{TEXT}"


async def test_a_chat_has_the_tokens_that_generate_computes(
    cluster: Cluster, client: DiptychClient
) -> None:
    token_ids = await client.tokenize(messages=TURNS)
    assert token_ids == await prompt_ids(cluster, build_request(messages=TURNS))


async def test_the_blocking_client_asks_the_same(cluster: Cluster) -> None:
    def ask() -> str:
        with BlockingClient(cluster.address) as client:
            return client.detokenize(client.tokenize(TEXT))

    assert await asyncio.to_thread(ask) == TEXT


@pytest.mark.parametrize(
    ("method", "asked", "field"),
    [
        ("Tokenize", TokenizeRequest(), "prompt"),
        ("Tokenize", TokenizeRequest(text=""), "text"),
        (
            "Tokenize",
            TokenizeRequest(chat=inference_pb2.ChatPrompt()),
            "chat.messages",
        ),
        ("Tokenize", TokenizeRequest(text="diptych " * 9000), "request"),
        ("Detokenize", DetokenizeRequest(), "token_ids"),
        ("Detokenize", DetokenizeRequest(token_ids=[5, 100_000]), "token_ids[1]"),
    ],
)
async def test_what_is_wrong_is_refused_by_its_own_name(
    cluster: Cluster, method: str, asked: Message, field: str
) -> None:
    error = await refusal(cluster, method, asked)
    assert isinstance(error, InvalidRequestError), error
    assert error.field == field


async def test_another_model_is_not_found(cluster: Cluster) -> None:
    asked = TokenizeRequest(text=TEXT, model="gpt-17")
    assert isinstance(await refusal(cluster, "Tokenize", asked), ModelNotFoundError)


async def test_what_is_not_served_says_so(wide_model: Path) -> None:
    """By a router that has no prefill workers."""
    each = [inference_pb2.Input(text=TEXT)]
    asked = {
        "Embed": inference_pb2.EmbedRequest(inputs=each),
        "Score": inference_pb2.ScoreRequest(text=TEXT, continuations=each),
    }
    async with running(wide_model, 0, 1) as cluster:
        for method, request in asked.items():
            error = await refusal(cluster, method, request)
            assert isinstance(error, NotServedError)
            assert error.code is grpc.StatusCode.UNIMPLEMENTED
            assert method in error.message
