"""The client for code without an event loop: what it does around its block. No sockets."""

import asyncio
import gc
import inspect
import warnings
from collections.abc import AsyncGenerator, Callable, Sequence

import pytest

from diptych.client import (
    BatchClient,
    BlockingBatchClient,
    BlockingClient,
    Chunk,
    DiptychClient,
    build_embed_request,
    build_request,
    build_score_request,
)
from diptych.errors import InvalidRequestError
from diptych.v1 import inference_pb2


async def _two(
    self: DiptychClient,
    request: inference_pb2.GenerateRequest,
    timeout_s: float | None = None,
    metadata: Sequence[tuple[str, str]] = (),
) -> AsyncGenerator[Chunk, None]:
    for text in (request.text, f"{timeout_s} {metadata}"):
        yield Chunk(text=text, request_id="r", model="m", seed=0)


@pytest.fixture(autouse=True)
def answering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DiptychClient, "stream", _two)


def test_a_built_request_is_streamed_with_all_that_goes_along() -> None:
    with BlockingClient("router:1") as client:
        chunks = list(client.stream(build_request("a"), 2.0, [("k", "v")]))
        assert [each.text for each in chunks] == ["a", "2.0 [('k', 'v')]"]
        assert next(client.generate("b")).text == "b"


@pytest.mark.parametrize(
    ("kind", "blocking"), [(DiptychClient, BlockingClient), (BatchClient, BlockingBatchClient)]
)
def test_all_that_a_client_takes_the_blocking_one_takes(kind: type, blocking: type) -> None:
    """But for ``close``, which is the end of the block."""
    names = {name for name in vars(kind) if not name.startswith("_")} - {"close"}
    for name in names | {"__init__"}:
        assert taken(kind, name) == taken(blocking, name), name


def taken(kind: type, name: str) -> dict[str, object]:
    """The defaults of what a method takes, by name."""
    member = getattr(kind, name)
    if isinstance(member, property):
        return {}
    return {each.name: each.default for each in inspect.signature(member).parameters.values()}


def test_what_a_blocking_call_is_told_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []

    async def score(self: DiptychClient, *given: object) -> None:
        told.append(given)

    async def detokenize(self: DiptychClient, *given: object, **more: object) -> None:
        told.append((*given, more))

    monkeypatch.setattr(DiptychClient, "score", score)
    monkeypatch.setattr(DiptychClient, "detokenize", detokenize)
    request = inference_pb2.ScoreRequest()
    with BlockingClient("router:1", on_retry=print) as client:
        assert client.router == "router:1"
        assert client._client._on_retry is print
        client.score(request, 2.0)
        client.detokenize([1], 3.0, keep_special_tokens=True)
    assert told == [(request, 2.0), ([1], 3.0, {"keep_special_tokens": True})]


def test_it_may_be_entered_again() -> None:
    client = BlockingClient("router:1")
    for _ in range(2):
        with client:
            assert next(client.generate("a")).text == "a"
    with pytest.raises(AssertionError, match="context manager"):
        client.generate("a")


def test_an_answer_that_outlives_the_block_ends_without_a_word(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with BlockingClient("router:1") as client:
            answer = client.generate("a")
            next(answer)
        with pytest.raises(RuntimeError, match="its block has ended"):
            next(answer)
        del answer
        gc.collect()
    assert capfd.readouterr().err == ""


def test_a_client_is_made_before_there_is_a_loop() -> None:
    client = DiptychClient("127.0.0.1:1", retries=0)

    async def close() -> None:
        assert client.router == "127.0.0.1:1"
        assert client._routers.asked is client._routers.asked, "opened once"
        await client.close()

    asyncio.run(close())


HALF = "caf\udce9"


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: build_request(HALF),
        lambda client: build_request(messages=[("user", HALF)]),
        lambda client: client.tokenize(HALF),
        lambda client: client.tokenize(messages=[("user", HALF)]),
        lambda client: build_score_request([HALF]),
        lambda client: build_score_request(["a"], HALF),
        lambda client: build_score_request(["a"], messages=[("user", HALF)]),
        lambda client: build_embed_request([HALF]),
    ],
)
def test_halves_of_characters_are_refused_before_anything_is_sent(
    ask: Callable[[BlockingClient], object],
) -> None:
    with (
        BlockingClient("127.0.0.1:1", retries=0) as client,
        pytest.raises(InvalidRequestError, match="is no character"),
    ):
        ask(client)


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.create("file-x", "/v1/completions", metadata={"name": HALF}),
        lambda client: client.state(HALF),
        lambda client: list(client.watch(HALF)),
        lambda client: client.batches(after=HALF),
        lambda client: client.cancel(HALF),
        lambda client: list(client.content(HALF)),
        lambda client: client.delete(HALF),
    ],
)
def test_so_are_they_in_what_is_said_of_a_batch_or_a_file(
    ask: Callable[[BlockingBatchClient], object],
) -> None:
    with (
        BlockingBatchClient("127.0.0.1:1", retries=0) as client,
        pytest.raises(InvalidRequestError, match="is no character"),
    ):
        ask(client)
