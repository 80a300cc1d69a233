"""An answer that breaks off goes on by itself, over real gRPC, wherever it was cut."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from diptych.cli.generate import run
from diptych.client import BlockingClient, Chunk, DiptychClient, SamplingOptions, build_request
from diptych.errors import (
    BlocksExhaustedError,
    ConfigurationError,
    DiptychError,
    InvalidApiKeyError,
    InvalidRequestError,
    NoWorkerError,
    QueueFullError,
    SlowClientError,
    TransferInterruptedError,
)
from diptych.finish_reason import FinishReason
from diptych.v1 import inference_pb2
from tests.integration.relay import relaying
from tests.integration.router_rig import PROMPT, Cluster, expected, running

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_TOKENS = 6  # their text: D E F G H I
MAX_MESSAGES = NUM_TOKENS + 4  # Started, each token, held-back text, the choice's end, Summary
STOPS = {
    "none": (),
    "held": ("FGX", "IX"),  # texts are held back in the middle, and at the end
    "ends": ("GH",),
}


@dataclass(frozen=True)
class Whole:
    """An answer, as its caller has it in the end."""

    token_ids: list[int]
    text: str
    ids: set[tuple[str, str]]  # of model and request
    last: Chunk

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> "Whole":
        at = 0
        for chunk in chunks:
            assert chunk.position == at
            at += len(chunk.token_ids)
        assert all(chunk.finish_reason is None for chunk in chunks[:-1])
        token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
        ids = {(chunk.model, chunk.request_id) for chunk in chunks}
        return cls(token_ids, "".join(chunk.text for chunk in chunks), ids, chunks[-1])


def request(stop: Sequence[str] = ()) -> inference_pb2.GenerateRequest:
    """Sampled, with a seed that the router draws."""
    options = SamplingOptions(
        max_tokens=NUM_TOKENS, ignore_eos=True, temperature=1.0, stop=tuple(stop)
    )
    return build_request(token_ids=PROMPT, options=options)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(wide_model: Path) -> AsyncIterator[Cluster]:
    async with running(wide_model, 1, 1) as up:
        yield up


async def ask(
    client: DiptychClient, asked: inference_pb2.GenerateRequest, timeout_s: float = 20
) -> Whole:
    return Whole.of([chunk async for chunk in client.stream(asked, timeout_s)])


@pytest.mark.parametrize("num_messages", range(MAX_MESSAGES + 1))
@pytest.mark.parametrize("stop", STOPS.values(), ids=STOPS)
async def test_it_goes_on_wherever_it_was_cut(
    cluster: Cluster, stop: tuple[str, ...], num_messages: int
) -> None:
    """Before Started, behind each message, and behind Summary, when nothing is missing."""
    async with DiptychClient(cluster.address) as client:
        undisturbed = await ask(client, request(stop))
    async with (
        relaying(cluster.address, num_messages) as cut,
        relaying(cluster.address) as other,
        DiptychClient(f"{cut.address}, {other.address}") as client,
    ):
        whole = await ask(client, request(stop))
    assert (whole.token_ids, whole.text) == (undisturbed.token_ids, undisturbed.text)
    assert len(whole.ids) == 1, "one answer has one id"
    last, usual = whole.last, undisturbed.last
    assert (last.finish_reason, last.stop_match) == (usual.finish_reason, usual.stop_match)
    assert last.usage is not None
    assert last.usage.num_output_tokens == len(whole.token_ids)
    assert len(other.requests) == (not any(each.HasField("summary") for each in cut.written))
    for again in other.requests:
        assert list(again.emitted_token_ids) == cut.token_ids()
        assert last.usage.num_resumed_tokens == len(cut.token_ids())
        if cut.written:
            assert again.sampling.seed == cut.written[0].started.seed == last.seed


async def test_it_goes_on_however_often_it_is_cut(cluster: Cluster) -> None:
    """Each router brings one token more and dies: tries that bring something are not counted."""
    async with (
        relaying(cluster.address, 2) as first,
        relaying(cluster.address, 2) as second,
        relaying(cluster.address, 2) as third,
        relaying(cluster.address) as last,
    ):
        addresses = ",".join(each.address for each in (first, second, third, last))
        async with DiptychClient(addresses, retries=1) as client:
            whole = await ask(client, request())
    assert whole.token_ids == expected(NUM_TOKENS)
    assert [len(each.emitted_token_ids) for each in last.requests] == [3]


async def test_what_the_caller_had_before_is_no_gap(cluster: Cluster) -> None:
    async with (
        relaying(cluster.address, 3) as cut,
        relaying(cluster.address) as other,
        DiptychClient(f"{cut.address},{other.address}") as client,
    ):
        asked = request()
        asked.sampling.seed = 5
        asked.emitted_token_ids.extend(expected(2))
        chunks = [chunk async for chunk in client.stream(asked, 20)]
    assert [t for chunk in chunks for t in chunk.token_ids] == expected(NUM_TOKENS)[2:]
    assert list(asked.emitted_token_ids) == expected(2), "the caller's own request"
    assert [list(each.emitted_token_ids) for each in other.requests] == [expected(4)]


async def test_one_router_that_comes_back_goes_on(cluster: Cluster) -> None:
    async with relaying(cluster.address, 3) as cut, DiptychClient(cut.address) as client:

        async def come_back() -> list[inference_pb2.GenerateRequest]:
            await cut.is_over.wait()
            async with relaying(cluster.address, listen=cut.address) as again:
                await answered.wait()
                return again.requests

        answered = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            back = tasks.create_task(come_back())
            assert (await ask(client, request())).token_ids == expected(NUM_TOKENS)
            answered.set()
    assert [list(each.emitted_token_ids) for each in back.result()] == [expected(2)]


async def test_the_command_goes_on_too(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    async def generate(num_messages: int | None, *args: str) -> tuple[int, str, str]:
        async with (
            relaying(cluster.address, num_messages) as cut,
            relaying(cluster.address) as other,
        ):
            flags = ["--address", f"{cut.address},{other.address}", "--prompt", "hello", *args]
            code = await asyncio.to_thread(run, [*flags, "--max-tokens", "6", "--ignore-eos"])
        return code, *capsys.readouterr()

    whole = await generate(None)
    assert whole[0] == 0
    assert len(whole[1]) > 2
    assert await generate(3) == whole
    code, shown, error = await generate(3, "--retries", "0")
    assert code == 1
    assert whole[1].startswith(shown.strip("\n"))
    assert "diptych generate: UNAVAILABLE" in error


async def test_later_requests_go_where_there_was_an_answer(cluster: Cluster) -> None:
    async with (
        relaying(cluster.address, 2) as cut,
        relaying(cluster.address) as other,
        DiptychClient(f"{cut.address},{other.address}", retries=1) as client,
    ):
        for _ in range(2):
            assert (await ask(client, request())).token_ids == expected(NUM_TOKENS)
    assert (len(cut.requests), len(other.requests)) == (1, 2)


async def test_any_call_finds_the_router_that_is_there(cluster: Cluster) -> None:
    def ask_blocking(addresses: str) -> list[int]:
        with BlockingClient(addresses) as client:
            assert client.models()[0].ready
            options = SamplingOptions(max_tokens=3, ignore_eos=True)
            chunks = list(client.generate(token_ids=PROMPT, options=options))
            return [token_id for chunk in chunks for token_id in chunk.token_ids]

    addresses = f"127.0.0.1:1,{cluster.address}"  # nobody listens on the first
    assert await asyncio.to_thread(ask_blocking, addresses) == expected(3)


SOON_S = 0.01


@pytest.mark.parametrize(
    "refusal",
    [
        QueueFullError("full", retry_after_s=SOON_S),
        BlocksExhaustedError("full", retry_after_s=SOON_S),
        NoWorkerError("none", retry_after_s=SOON_S),
        TransferInterruptedError("cut"),
    ],
    ids=lambda error: error.reason,
)
async def test_what_may_heal_is_asked_again(cluster: Cluster, refusal: DiptychError) -> None:
    async with relaying(cluster.address) as relay, DiptychClient(relay.address) as client:
        relay.refusals = [refusal]
        assert (await ask(client, request())).last.finish_reason is FinishReason.LENGTH
        assert len(relay.requests) == 2


@pytest.mark.parametrize(
    "refusal",
    [
        InvalidRequestError("wrong", field="a"),
        InvalidApiKeyError("who"),
        SlowClientError("slow"),
        BlocksExhaustedError("it never fits"),
        QueueFullError("full", retry_after_s=3600.0),
        QueueFullError("beyond the deadline", retry_after_s=25.0),
    ],
    ids=lambda error: error.message,
)
async def test_what_will_not_heal_is_told_at_once(cluster: Cluster, refusal: DiptychError) -> None:
    async with relaying(cluster.address) as relay, DiptychClient(relay.address) as client:
        relay.refusals = [refusal]
        with pytest.raises(type(refusal)):
            await ask(client, request(), timeout_s=20)
        assert len(relay.requests) == 1


@pytest.mark.parametrize("retries", [0, 2])
async def test_tries_are_bounded(cluster: Cluster, retries: int) -> None:
    async with (
        relaying(cluster.address) as relay,
        DiptychClient(relay.address, retries=retries) as client,
    ):
        relay.refusals = [NoWorkerError(str(i), retry_after_s=SOON_S) for i in range(9)]
        with pytest.raises(NoWorkerError) as caught:
            await ask(client, request())
        assert caught.value.message == str(retries), "the last one is told"
        assert len(relay.requests) == 1 + retries


@pytest.mark.parametrize("address", ["", "a:1,", ",", "a:1,,b:2"])
async def test_an_address_is_missing(address: str) -> None:
    with pytest.raises(ConfigurationError, match="expected host:port"):
        DiptychClient(address)
