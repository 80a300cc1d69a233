"""A large answer goes out as its client takes it, within a time that grows with its size."""

import asyncio
import json
import math
import tracemalloc
from array import array
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from opentelemetry.context import Context

from diptych.errors import DiptychError, SlowClientError
from diptych.finish_reason import FinishReason
from diptych.sampling_params import NOTHING_SAID
from diptych.tenant import Limits
from router.frontend.admission import Admission
from router.frontend.generator import Generator, _Answer
from router.frontend.http import exchange
from router.frontend.http.answer_form import COMPLETION, Heading, WholeAnswer
from router.frontend.http.choices_form import ChoicesWriters
from router.frontend.http.completion_request import read_completion
from router.frontend.http.exchange import CONNECTION, BodyRoom, Exchange
from router.frontend.http.generation import GenerationAnswers
from router.frontend.http.posted import Answer, Posted
from router.frontend.http.prompt_work import PromptRoutes
from router.frontend.prompt_answers import PromptAnswers
from router.frontend.quotas import Quotas
from router.generation.answer import (
    ChoiceFinished,
    Delta,
    GenerationEvent,
    Started,
    Summary,
    Timing,
    Usage,
)
from router.generation.prompt_work import Embeddings
from router.untaken import Untaken
from tests.virtual_time import run_virtually

WRITE_S = 30.0
PIECE_BYTES = 2**18
LARGE = {"said": "x" * (9 * PIECE_BYTES)}
NUM_PIECES = 10  # with the last that is not full
USAGE = Usage(num_prompt_tokens=1, num_output_tokens=1, num_cached_tokens=0)
MODEL = SimpleNamespace(
    name="m", pooling=None, tokenizer=SimpleNamespace(text=None), recommended=NOTHING_SAID
)
ADMISSION = cast(Admission, SimpleNamespace(model=MODEL, max_model_len=100))


class Client:
    """Takes a piece in ``piece_s``; while it does so, whoever sends another waits for it."""

    large_bytes = PIECE_BYTES // 4
    """Smaller ones take no time."""

    def __init__(self, piece_s: float, request: bytes = b"{}") -> None:
        self.sent: list[dict[str, Any]] = []
        self.is_there, self.was_cut = True, False
        self.takes_more = False
        self.taker = Untaken(lambda: 0.0).open()
        self.at_once_bytes = 2**20
        self.has_taken_s = 0.0
        self._piece_s = piece_s
        self._request = [{"type": "http.request", "body": request}]

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])

    @property
    def has_all(self) -> bool:
        return self.sent[-1].get("more_body") is False

    def cut(self) -> None:
        self.was_cut = True

    async def receive(self) -> dict[str, Any]:
        if not self._request:
            await asyncio.Event().wait()
        return self._request.pop()

    async def send(self, message: dict[str, Any]) -> None:
        left_s = self.has_taken_s - asyncio.get_running_loop().time()
        if left_s == math.inf:
            await asyncio.Event().wait()
        await asyncio.sleep(max(0.0, left_s))
        if len(message.get("body", b"")) > self.large_bytes:
            self.has_taken_s = asyncio.get_running_loop().time() + self._piece_s
        self.sent.append(message)

    def ask(self, answer: Answer) -> float:
        """When the call ended, which began at 0."""
        scope = {
            "type": "http",
            "headers": [(b"content-type", b"application/json")],
            CONNECTION: self,
        }
        route = Posted(answer, BodyRoom(2**20, 2**20, WRITE_S))

        async def call() -> float:
            async with asyncio.timeout(10**6):
                await route(scope, self.receive, self.send)  # type: ignore[arg-type]
            return asyncio.get_running_loop().time()

        return run_virtually(call())


class Told:
    """Answers with as much as is given, and keeps how that ended."""

    def __init__(self, content: dict[str, str]) -> None:
        self.error: BaseException | None = None
        self._content = content

    async def __call__(self, exchange: Exchange, data: bytes) -> None:
        try:
            await exchange.send_json(self._content)
        except BaseException as error:
            self.error = error
            raise


def test_a_small_answer_is_written_at_once() -> None:
    client, told = Client(0.0), Told({"said": "x" * 60_000})
    client.ask(told)
    assert [message["type"] for message in client.sent] == [
        "http.response.start",
        "http.response.body",
    ]
    assert (client.has_all, told.error) == (True, None)


@pytest.mark.parametrize("piece_s", [0.0, 1.0, WRITE_S - 1])
def test_who_takes_each_piece_in_time_gets_all_however_long_that_is(piece_s: float) -> None:
    client, told = Client(piece_s), Told(LARGE)
    ended_s = client.ask(told)
    assert json.loads(client.body) == LARGE
    pieces = [message["body"] for message in client.sent[1:]]
    assert [len(piece) for piece in pieces[:-2]] == [PIECE_BYTES] * (NUM_PIECES - 1)
    assert pieces[-1] == b"", "the last that says something was taken before"
    assert ended_s >= (NUM_PIECES - 1) * piece_s
    assert (client.has_all, client.was_cut, told.error) == (True, False, None)


@pytest.mark.parametrize(("piece_s", "latest_s"), [(math.inf, WRITE_S), (45.0, 10 * WRITE_S)])
def test_who_takes_too_little_is_cut_off(piece_s: float, latest_s: float) -> None:
    client, told = Client(piece_s), Told(LARGE)
    assert client.ask(told) <= latest_s
    assert isinstance(told.error, SlowClientError)
    assert (client.has_all, client.was_cut) == (False, True)


def test_time_that_a_piece_leaves_is_for_those_behind_it() -> None:
    client = Client(1.0)

    async def answer(exchange: Exchange, data: bytes) -> None:
        asyncio.get_running_loop().call_later(2.5, setattr, client, "_piece_s", 2.5 * WRITE_S)
        asyncio.get_running_loop().call_later(3.5, setattr, client, "_piece_s", 0.0)
        await exchange.send_json(LARGE)

    client.ask(answer)
    assert (client.has_all, client.was_cut) == (True, False)


def test_nothing_more_is_written_for_who_left() -> None:
    client, told = Client(1.0), Told(LARGE)

    async def answer(exchange: Exchange, data: bytes) -> None:
        asyncio.get_running_loop().call_later(2.5, setattr, client, "is_there", False)
        await told(exchange, data)

    client.ask(answer)
    assert isinstance(told.error, asyncio.CancelledError)
    assert len(client.body) == 4 * PIECE_BYTES


def test_who_was_the_slowest_at_the_end_of_an_answer_loses_its_connection() -> None:
    """Else all that it did not take would stay with the system, and its connection with us."""
    client = Client(1.0)

    async def answer(exchange: Exchange, data: bytes) -> None:
        await exchange.send_json({})
        client.taker.cut("too much waits for all")

    client.ask(answer)
    assert (client.has_all, client.was_cut) == (True, True)


class Prompts:
    """Vectors of many numbers, in a call whose end is kept."""

    def __init__(self, seen: Callable[[], int]) -> None:
        self.ended_at: int | None = None
        self.error: DiptychError | None = None
        self._seen = seen

    @contextmanager
    def answering(self, *given: object) -> Iterator[None]:
        try:
            yield
        except DiptychError as error:
            self.error = error
            raise
        finally:
            self.ended_at = self._seen()

    async def embed(self, call: None) -> Embeddings:
        return Embeddings(((0.0,) * 100_000,), USAGE)


@pytest.mark.parametrize("piece_s", [1.0, math.inf])
def test_work_on_prompts_is_open_until_its_client_has_the_answer(piece_s: float) -> None:
    client = Client(piece_s, b'{"model":"m","input":"a"}')
    prompts = Prompts(lambda: len(client.sent))
    client.ask(PromptRoutes(ADMISSION, cast(PromptAnswers, prompts)).embeddings)
    assert prompts.ended_at == len(client.sent)
    assert isinstance(prompts.error, SlowClientError) == client.was_cut == (piece_s == math.inf)


class Unread:
    """Gives up by itself before there is an answer."""

    async def generate(self, *_: object, **__: object) -> AsyncGenerator[GenerationEvent, None]:
        yield Started("r", "m", 0, ())
        raise SlowClientError("the client left 9 responses unread")


def test_a_generation_that_gave_up_before_it_was_written_says_why() -> None:
    client = Client(1.0, b'{"model":"m","prompt":"p"}')
    unread, writers = cast(Generator, Unread()), ChoicesWriters(COMPLETION)
    client.ask(GenerationAnswers(ADMISSION, unread, read_completion, writers))
    assert (client.sent[0]["status"], client.was_cut) == (408, False)
    assert json.loads(client.body)["error"]["code"] == "client_too_slow"


class Generating:
    """One long text; keeps how its client's taking it ended."""

    def __init__(self, seen: Callable[[], int]) -> None:
        self.ended_at: int | None = None
        self.error: DiptychError | None = None
        self.is_whole = self.has_ended_itself = False
        self._seen = seen

    async def generate(
        self, *_: object, is_whole: bool, **__: object
    ) -> AsyncGenerator[GenerationEvent, None]:
        self.is_whole = is_whole
        yield Started("r", "m", 0, ())
        yield Delta("x" * (3 * PIECE_BYTES), [1], 0, [])
        yield ChoiceFinished(FinishReason.LENGTH)
        try:
            yield Summary(USAGE, Timing())
            self.has_ended_itself = True  # as a success, of which the record says so
        except DiptychError as error:
            self.error = error
            raise
        finally:
            self.ended_at = self._seen()


@pytest.mark.parametrize("piece_s", [1.0, math.inf])
def test_a_generation_is_open_until_its_client_has_the_answer(piece_s: float) -> None:
    client = Client(piece_s, b'{"model":"m","prompt":"p"}')
    generating = Generating(lambda: len(client.sent))
    writers = ChoicesWriters(COMPLETION)
    client.ask(GenerationAnswers(ADMISSION, cast(Generator, generating), read_completion, writers))
    assert generating.is_whole
    assert generating.has_ended_itself == client.has_all
    assert generating.ended_at == len(client.sent)
    assert isinstance(generating.error, SlowClientError) == client.was_cut == (piece_s == math.inf)


async def test_an_answer_is_never_there_twice_as_parts_and_as_a_whole() -> None:
    content = {"a": [array("d", [1 / 3] * 20_000)] * 8, "b": array("f", [0.25] * 3), "c": []}
    tracemalloc.start()
    body = await exchange._written(content)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert json.loads(body) == {"a": [[1 / 3] * 20_000] * 8, "b": [0.25] * 3, "c": []}
    assert peak < 1.5 * len(body)


def test_an_answer_in_the_making_takes_little_more_than_its_text() -> None:
    """A body of 128 prompts may make millions of tokens."""
    heading = Heading(form=COMPLETION, request_id="r", model="m", created_s=17)
    answer, num_tokens = WholeAnswer(heading), 20_000
    texts = [f"{number:05}\r\n" for number in range(num_tokens)]
    tracemalloc.start()
    for number in range(num_tokens):
        answer.add(Delta(f"{number:05}\r\n", [7], number, []))
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert answer.choice()["text"] == "".join(texts)
    assert kept < 2 * 7 * num_tokens


class Saying:
    """In the place of a session: says one long text, unless its client takes nothing."""

    usage, timing, finish_reason, model_digest = USAGE, Timing(), None, "m"

    def __init__(self, on_failed: Callable[[], None]) -> None:
        self._events = iter((Delta("x" * (3 * PIECE_BYTES), [1], 0, []), None))
        self._error: SlowClientError | None = None
        self._on_failed = on_failed

    async def next_event(self) -> Delta | None:
        if self._error is not None:
            raise self._error
        return next(self._events, None)

    def give_up(self, why: str) -> None:
        self._error = SlowClientError(why)
        self._on_failed()

    def close(self) -> None: ...


@pytest.mark.parametrize("piece_s", [WRITE_S - 1, math.inf])
def test_a_large_event_of_a_stream_has_time_for_each_part_that_its_client_takes(
    piece_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes: list[str] = []
    observer: Any = SimpleNamespace(
        request_id="r",
        context=Context(),
        ended=lambda outcome, *_, **__: outcomes.append(outcome),
    )

    @contextmanager
    def hold(*_: object) -> Iterator[None]:
        yield

    async def admit(*_: object, **__: object) -> object:
        shape = SimpleNamespace(prompt_ids=(1,))
        return SimpleNamespace(num_tokens_at_most=1, shape=shape, sampling=SimpleNamespace(seed=1))

    def open_(answer: Any, *_: object) -> Saying:
        moments = SimpleNamespace(placed_s=1.0)
        answer._builder = SimpleNamespace(moments=moments, num_output_tokens=0)
        answer._session = Saying(answer._on_failed)
        return cast(Saying, answer._session)

    monkeypatch.setattr(_Answer, "open", open_)
    monkeypatch.setattr(Generator, "_observe", lambda *_, **__: observer)
    admission: Any = SimpleNamespace(
        hold=hold, admit=admit, is_cut_off=False, model=MODEL, max_model_len=100
    )
    timers = SimpleNamespace(client_write_s=WRITE_S)
    services: Any = SimpleNamespace(config=SimpleNamespace(timers=timers))
    quotas, nothing = Quotas(Limits(), lambda: 0.0, lambda what: None), cast(Any, None)
    generator = Generator(admission, quotas, services, nothing, Untaken(lambda: 0.0))
    client = Client(piece_s, b'{"model":"m","prompt":"p","stream":true}')
    client.at_once_bytes, client.large_bytes = PIECE_BYTES, 16_384
    writers = ChoicesWriters(COMPLETION)
    ended_s = client.ask(GenerationAnswers(admission, generator, read_completion, writers))
    assert client.has_all == (piece_s < WRITE_S)
    assert outcomes == ["ok" if client.has_all else "CLIENT_TOO_SLOW"]
    assert ended_s > 2 * piece_s if client.has_all else ended_s < 2 * WRITE_S
