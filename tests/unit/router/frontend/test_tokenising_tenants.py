"""Whoever has a text tokenised is a tenant: by turns of tenants they come to it."""

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from diptych.rpc.server import Context
from diptych.tenant import Tenant
from diptych.v1.inference_pb2 import DetokenizeRequest, TokenizeRequest
from router.frontend.admission import Admission
from router.frontend.cluster_view import ClusterView
from router.frontend.generator import Generator
from router.frontend.grpc import InferenceServicer
from router.frontend.handed_over import HandedOver
from router.frontend.http.exchange import TENANT, BodyRoom
from router.frontend.http.posted import Posted
from router.frontend.http.tokens import TokenAnswers
from router.frontend.prompt_answers import PromptAnswers
from router.generation.request import GenerationRequest

ALICE = Tenant("alice")


class Door:
    """Remembers for whom it tokenised."""

    max_model_len = 100

    def __init__(self) -> None:
        self.tenants: list[Tenant] = []
        self.deadlines_s: list[float | None] = []

    @contextmanager
    def hold(self, tenant: Tenant, num_bytes: int) -> Iterator[None]:
        yield

    async def tokenize(self, request: GenerationRequest, deadline_s: float | None) -> list[int]:
        self.tenants.append(request.tenant)
        self.deadlines_s.append(deadline_s)
        return [1]

    async def decode(self, token_ids: list[int], **_: object) -> str:
        return "a"


class Callers:
    """All are Alice."""

    async def tenant(self, authorization: str | None) -> Tenant:
        return ALICE

    async def run(self) -> None: ...


EACH = pytest.mark.parametrize(
    ("path", "said"),
    [
        ("tokenize", {"prompt": "a"}),
        ("tokenize", {"messages": [{"role": "user", "content": "a"}]}),
        ("detokenize", {"tokens": [1]}),
    ],
)


async def asked(
    door: Door, path: str, said: dict[str, object], *more: tuple[bytes, bytes]
) -> list[Any]:
    """What is sent in answer to a body with more headers."""
    bodies: list[dict[str, Any]] = [{"type": "http.request", "body": json.dumps(said).encode()}]
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        if not bodies:
            await asyncio.Event().wait()
        return bodies.pop()

    async def send(message: object) -> None:
        sent.append(message)

    answers = Posted(getattr(TokenAnswers(cast(Admission, door)), path), BodyRoom(200, 200, 9.0))
    headers = [(b"content-type", b"application/json"), *more]
    scope = {"type": "http", "headers": headers, TENANT: ALICE}
    await answers(scope, receive, send)
    return sent


@EACH
async def test_over_http(path: str, said: dict[str, object]) -> None:
    door = Door()
    sent = await asked(door, path, said)
    assert sent[0]["status"] == 200
    assert door.tenants == [ALICE]
    assert door.deadlines_s == [None]


@EACH
async def test_over_http_a_time_is_a_deadline(path: str, said: dict[str, object]) -> None:
    door = Door()
    begun_s = time.monotonic()
    await asked(door, path, said, (b"x-request-timeout", b"60"))
    (deadline_s,) = door.deadlines_s
    assert deadline_s is not None
    assert 60 <= deadline_s - begun_s <= 60 + time.monotonic() - begun_s
    head, body = await asked(door, path, said, (b"x-request-timeout", b"soon"))
    assert head["status"] == 400
    assert json.loads(body["body"])["error"]["param"] == "x-request-timeout"


TEXT: dict[str, object] = {"prompt": "a"}
CHAT: dict[str, object] = {"messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("said", "param"),
    [
        ({**TEXT, "return_token_strs": True}, "return_token_strs"),
        ({**CHAT, "return_token_strs": True}, "return_token_strs"),
        ({**TEXT, **CHAT}, "prompt"),
    ],
)
async def test_over_http_what_would_change_the_answer_elsewhere_is_refused_by_its_name(
    said: dict[str, object], param: str
) -> None:
    head, body = await asked(Door(), "tokenize", said)
    assert head["status"] == 400
    assert json.loads(body["body"])["error"]["param"] == param
    for neutral in ({**TEXT, "return_token_strs": False}, {**CHAT, "prompt": None}):
        head, _ = await asked(Door(), "tokenize", neutral)
        assert head["status"] == 200


async def test_over_grpc() -> None:
    door, nothing = Door(), SimpleNamespace()
    servicer = InferenceServicer(
        cast(Admission, door),
        cast(Generator, nothing),
        cast(PromptAnswers, nothing),
        Callers(),
        cast(ClusterView, nothing),
        max_request_bytes=100,
        handed=HandedOver(2**20),
    )
    context = cast(Context, SimpleNamespace(invocation_metadata=tuple, time_remaining=lambda: 60.0))
    await servicer.Tokenize(TokenizeRequest(text="a").SerializeToString(), context)
    await servicer.Detokenize(DetokenizeRequest(token_ids=[1]).SerializeToString(), context)
    assert door.tenants == [ALICE, ALICE]
    assert None not in door.deadlines_s
