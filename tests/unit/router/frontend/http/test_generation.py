"""How a generation ends that cannot be read, or fails while the client is being written to."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from diptych.errors import DiptychError, InvalidRequestError, NoWorkerError, SlowClientError
from diptych.finish_reason import FinishReason
from diptych.sampling_params import NOTHING_SAID
from diptych.tenant import Tenant
from diptych.token_logprobs import PromptLogprobs, TokenLogprobs
from router.frontend.admission import Admission
from router.frontend.generator import Generator
from router.frontend.http.answer_form import COMPLETION
from router.frontend.http.answer_writer import (
    Answered,
    AnswerWriters,
    StreamWriter,
    WholeWriter,
)
from router.frontend.http.asked import Asked
from router.frontend.http.chat_form import CHAT
from router.frontend.http.chat_request import read_chat
from router.frontend.http.choices_form import ChoicesWriters
from router.frontend.http.completion_request import read_completion
from router.frontend.http.exchange import CONNECTION, TENANT, BodyRoom
from router.frontend.http.generation import GenerationAnswers, Read
from router.frontend.http.posted import Posted
from router.frontend.http.response_form import ResponseWriters
from router.frontend.http.response_request import read_response
from router.frontend.told_logprobs import MAX_LOGPROBS
from router.generation.answer import (
    ChoiceFinished,
    Delta,
    GenerationEvent,
    Outlet,
    Started,
    Summary,
    Timing,
    Usage,
)
from router.generation.request import GenerationRequest, LogprobRoom
from router.untaken import Untaken

ALICE = Tenant("alice")
TOKENIZER = SimpleNamespace(text=None)
MODEL = SimpleNamespace(name="m", tokenizer=TOKENIZER, recommended=NOTHING_SAID)
ADMISSION = SimpleNamespace(model=MODEL, max_model_len=100)
JSON = [(b"content-type", b"application/json")]
ROOM = BodyRoom(max_bytes=100, max_all_bytes=100, patience_s=30.0)


class Failing:
    """Fails while its second piece is being written."""

    def __init__(self, error: DiptychError) -> None:
        self._error = error

    async def generate(
        self, *_: object, give_up: Callable[[], None], **__: object
    ) -> AsyncGenerator[GenerationEvent, None]:
        yield Delta("a", [1], 0, [])
        asyncio.get_running_loop().call_soon(give_up)
        yield Delta("b", [2], 1, [])
        raise self._error


class Behind:
    """A client that takes no more after the first piece, until its answer was given up."""

    def __init__(self, body: bytes | None) -> None:
        self.sent: list[dict[str, Any]] = []
        self.num_given_up = 0
        self._body = [] if body is None else [{"type": "http.request", "body": body}]

    async def receive(self) -> dict[str, Any]:
        if not self._body:
            await asyncio.Event().wait()
        return self._body.pop()

    async def send(self, message: dict[str, Any]) -> None:
        if len(self.sent) == 2 and not self.num_given_up:
            try:
                await asyncio.Event().wait()
            finally:
                self.num_given_up += 1
        self.sent.append(message)


class Recording:
    """Takes what was refused."""

    def __init__(self) -> None:
        self.refusals: list[tuple[str, dict[str, str | Tenant]]] = []

    def refused(self, reason: str, metadata: object, **rest: str | Tenant) -> None:
        self.refusals.append((reason, rest))


class Asking:
    """Remembers the room that there is for a request's log probabilities, and fails."""

    def __init__(self) -> None:
        self.room: LogprobRoom | None = None

    async def generate(
        self, request: GenerationRequest, **_: object
    ) -> AsyncGenerator[GenerationEvent, None]:
        self.room = request.logprob_room
        raise NoWorkerError("gone")
        yield


@pytest.mark.parametrize(
    ("read", "writers", "input_name"),
    [
        (read_chat, ChoicesWriters(CHAT), "messages"),
        (read_response, ResponseWriters(), "input"),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_log_probabilities_count_until_the_client_has_them(
    read: Read, writers: AnswerWriters, input_name: str, *, is_stream: bool
) -> None:
    """A stream of choices has told those of the output; a response says them again at its end."""
    said = {"model": "m", input_name: [{"role": "user", "content": "a"}], "stream": is_stream}
    asking = Asking()
    answers = GenerationAnswers(cast(Admission, ADMISSION), cast(Generator, asking), read, writers)
    client = Behind(json.dumps(said).encode())
    scope = {"type": "http", "headers": JSON}
    await Posted(answers, ROOM)(scope, client.receive, client.send)  # type: ignore[arg-type]
    assert asking.room == (MAX_LOGPROBS, is_stream and input_name == "messages")


@pytest.mark.parametrize(
    ("body", "headers", "room", "reason"),
    [
        (b"{}", JSON, ROOM, "REQUEST_INVALID"),
        (b"{}", [], ROOM, "REQUEST_INVALID"),
        (b"{" * 101, JSON, ROOM, "REQUEST_INVALID"),
        (b"{}", JSON, BodyRoom(100, 1, 30.0, free_bytes=0), "QUEUE_FULL"),
        (None, JSON, BodyRoom(100, 100, 0.0), "CLIENT_TOO_SLOW"),
    ],
)
@pytest.mark.parametrize(
    ("read", "writers", "operation"),
    [
        (read_completion, ChoicesWriters(COMPLETION), "text_completion"),
        (read_chat, ChoicesWriters(CHAT), "chat"),
        (read_response, ResponseWriters(), "chat"),
    ],
)
async def test_every_refusal_leaves_a_record_under_its_id(
    body: bytes | None,
    headers: list[tuple[bytes, bytes]],
    room: BodyRoom,
    reason: str,
    read: Read,
    writers: AnswerWriters,
    operation: str,
) -> None:
    generator = Recording()
    answers = GenerationAnswers(
        cast(Admission, ADMISSION), cast(Generator, generator), read, writers
    )
    client = Behind(body)
    scope = {"type": "http", "headers": [*headers, (b"x-request-id", b"mine")], TENANT: ALICE}
    await Posted(answers, room, answers.refused)(scope, client.receive, client.send)  # type: ignore[arg-type]
    told = {"request_id": "mine", "operation": operation, "tenant": ALICE}
    assert generator.refusals == [(reason, told)]


async def answered(error: DiptychError) -> Behind:
    answers = GenerationAnswers(
        cast(Admission, ADMISSION),
        cast(Generator, Failing(error)),
        read_completion,
        ChoicesWriters(COMPLETION),
    )
    client = Behind(b'{"model":"m","prompt":"p","stream":true}')
    scope = {"type": "http", "headers": JSON}
    await Posted(answers, ROOM)(scope, client.receive, client.send)  # type: ignore[arg-type]
    assert client.num_given_up == 1
    return client


async def test_a_client_that_is_merely_behind_is_told_what_failed() -> None:
    client = await answered(NoWorkerError("gone"))
    told, end, _ = client.sent[-1]["body"].decode().split("\n\n")
    assert json.loads(told.removeprefix("data: "))["error"]["code"] == "no_worker"
    assert (end, client.sent[-1]["more_body"]) == ("data: [DONE]", False)


async def test_a_client_that_takes_nothing_is_told_nothing() -> None:
    assert len((await answered(SlowClientError("full"))).sent) == 2


class Keeping:
    """Says nothing of four tokens: they belong to a call that has not ended."""

    async def generate(self, *_: object, **__: object) -> AsyncGenerator[GenerationEvent, None]:
        for position in range(4):
            yield Delta("", [1], position, [])
        yield Delta("b", [2], 4, [])


async def test_a_stream_that_keeps_a_call_back_says_that_it_lives() -> None:
    """For so long since its last piece, of whichever kind."""
    moments = iter((0.0, 5.0, 14.0, 16.0, 16.0, 20.0, 21.0))
    answers = GenerationAnswers(
        cast(Admission, ADMISSION),
        cast(Generator, Keeping()),
        read_completion,
        ChoicesWriters(COMPLETION),
        lambda: next(moments),
    )
    client = Behind(b'{"model":"m","prompt":"p","stream":true}')
    client.num_given_up = 1  # it takes all
    await Posted(answers, ROOM)({"type": "http", "headers": JSON}, client.receive, client.send)  # type: ignore[arg-type]
    bodies = [each["body"] for each in client.sent if each["type"] == "http.response.body"]
    kinds = [body[:2] for body in bodies]
    assert kinds == [b"da", b": ", b"da", b""]


class Direct:
    """A connection that takes pieces at once, as long as the client is not behind."""

    def __init__(self, client: Behind) -> None:
        self.takes_more = True
        self.taker = Untaken(lambda: 0.0).open()
        self.at_once_bytes = 2**20
        self._client = client

    def write_piece(self, piece: bytes) -> None:
        self._client.sent.append({"type": "at once", "body": piece})


class Outletting:
    """Has pieces for whoever waits, and others for its outlet where that is open."""

    def __init__(self, connection: Direct) -> None:
        self._connection = connection
        self.was_open: list[bool] = []

    async def generate(
        self, *_: object, outlet: Outlet, **__: object
    ) -> AsyncGenerator[GenerationEvent, None]:
        self.was_open.append(outlet.is_open)
        yield Delta("a", [1], 0, [])
        self.was_open.append(outlet.is_open)
        if outlet.is_open:
            outlet.write(Delta("b", [2], 1, []))
            outlet.write(Delta("", [3], 2, []))
            outlet.write(Delta("", [4], 3, []))
        self._connection.takes_more = False
        self.was_open.append(outlet.is_open)
        yield Delta("c", [5], 4, [])
        self._connection.takes_more = True
        yield Summary(
            Usage(num_prompt_tokens=1, num_output_tokens=5, num_cached_tokens=0), Timing()
        )


@pytest.mark.parametrize("is_stream", [True, False])
async def test_pieces_go_past_the_task_in_their_order(is_stream: bool) -> None:
    """Behind the first, which has the head; a comment, too, where nothing is said for long."""
    moments = iter((0.0, 1.0, 2.0, 11.0, 13.0, 13.0, 14.0, 15.0))
    client = Behind(json.dumps({"model": "m", "prompt": "p", "stream": is_stream}).encode())
    client.num_given_up = 1  # it takes all
    direct = Direct(client)
    generator = Outletting(direct)
    answers = GenerationAnswers(
        cast(Admission, ADMISSION),
        cast(Generator, generator),
        read_completion,
        ChoicesWriters(COMPLETION),
        lambda: next(moments),
    )
    scope = {"type": "http", "headers": JSON, CONNECTION: direct}
    await Posted(answers, ROOM)(scope, client.receive, client.send)  # type: ignore[arg-type]
    assert generator.was_open == [False, is_stream, False]
    if is_stream:
        body = "http.response.body"
        assert [(each["type"], _text_of(each["body"])) for each in client.sent[1:]] == [
            (body, "a"),
            ("at once", "b"),
            ("at once", ":"),
            (body, "c"),
            (body, ""),
            (body, "end"),
        ]


def _text_of(body: bytes) -> str:
    if not body.startswith(b"data: "):
        return body[:1].decode() or "end"
    return str(json.loads(body.partition(b"\n")[0][6:])["choices"][0]["text"])


class BreakingOff:
    """Fails after its first piece."""

    async def generate(self, *_: object, **__: object) -> AsyncGenerator[GenerationEvent, None]:
        yield Delta("a", [1], 0, [])
        raise NoWorkerError("gone")


async def test_detail_19_a_stream_of_a_response_breaks_off_in_its_own_words() -> None:
    answers = GenerationAnswers(
        cast(Admission, ADMISSION),
        cast(Generator, BreakingOff()),
        read_response,
        ResponseWriters(),
    )
    client = Behind(b'{"model":"m","input":"p","stream":true}')
    client.num_given_up = 1  # it takes all
    await Posted(answers, ROOM)({"type": "http", "headers": JSON}, client.receive, client.send)  # type: ignore[arg-type]
    kind, told = client.sent[-1]["body"].decode().split("\n", 1)
    assert kind == "event: response.failed"
    failed = json.loads(told.removeprefix("data: "))["response"]
    assert failed["error"] == {"code": "server_error", "message": "no_worker: gone"}


class Refusing:
    """Refuses before there is an event."""

    async def generate(self, *_: object, **__: object) -> AsyncGenerator[GenerationEvent, None]:
        raise InvalidRequestError("too many", field="sampling.n")
        yield


class NoForm:
    """Knows no form for an answer."""

    operation = "chat"
    repeats_all = False

    def whole(self, asked: Asked, answered: Answered) -> WholeWriter:
        raise AssertionError

    def stream(self, asked: Asked, answered: Answered) -> StreamWriter:
        raise AssertionError


@pytest.mark.parametrize("is_stream", [False, True])
async def test_nothing_is_made_for_the_choices_of_what_is_refused(is_stream: bool) -> None:
    """Their number is not checked before."""
    answers = GenerationAnswers(
        cast(Admission, ADMISSION), cast(Generator, Refusing()), read_completion, NoForm()
    )
    body = {"model": "m", "prompt": "p", "n": 10**9, "stream": is_stream}
    client = Behind(json.dumps(body).encode())
    client.num_given_up = 1  # it takes all
    await Posted(answers, ROOM)({"type": "http", "headers": JSON}, client.receive, client.send)  # type: ignore[arg-type]
    assert json.loads(client.sent[-1]["body"])["error"]["param"] == "n"


class Telling:
    """Tells of many tokens with their likeliest, and of a prompt of as many."""

    num_tokens = 3000

    def __init__(self) -> None:
        self.outlet: Outlet | None = None

    async def generate(
        self, *_: object, outlet: Outlet | None, **__: object
    ) -> AsyncGenerator[GenerationEvent, None]:
        self.outlet = outlet
        each = TokenLogprobs(-0.5, (1, 2, 3), (-1.5, -2.5, -3.5))
        num = self.num_tokens
        yield Started("r", "m", 0, (7,) * (num + 1))
        yield PromptLogprobs(position=1, logprobs=(each,) * num)
        for position in range(num):
            yield Delta("a", [1], position, [], (each,))
        yield ChoiceFinished(FinishReason.LENGTH)
        usage = Usage(num_prompt_tokens=num + 1, num_output_tokens=num, num_cached_tokens=0)
        yield Summary(usage, Timing())


class Spelling:
    """Each token is one character; the same before and behind any other."""

    def spelling(self, token_id: int) -> bytes:
        return b"a"

    def assembler(self) -> "Spelling":
        return self

    def push(self, token_id: int) -> str:
        return "a"

    def end_before(self, token_id: int) -> str:
        return ""


LARGE_STREAMS: list[tuple[Read, AnswerWriters, dict[str, object]]] = [
    (
        read_response,
        ResponseWriters(),
        {"input": "p", "include": ["message.output_text.logprobs"], "top_logprobs": 3},
    ),
    (
        read_completion,
        ChoicesWriters(COMPLETION),
        {"prompt": "p", "echo": True, "logprobs": 3},
    ),
]


@pytest.mark.parametrize(("read", "writers", "members"), LARGE_STREAMS)
async def test_a_large_event_of_a_stream_is_written_in_turns_with_other_tasks(
    read: Read, writers: AnswerWriters, members: dict[str, object]
) -> None:
    """The end of a response says all log probabilities again, four times; an echo the prompt's."""
    model = SimpleNamespace(
        name="m", tokenizer=SimpleNamespace(text=Spelling()), recommended=NOTHING_SAID
    )
    admission: Any = SimpleNamespace(model=model, max_model_len=10_000)
    answers = GenerationAnswers(admission, cast(Generator, Telling()), read, writers)
    client = Behind(json.dumps({"model": "m", "stream": True, **members}).encode())
    client.num_given_up = 1  # it takes all
    room = BodyRoom(max_bytes=1000, max_all_bytes=1000, patience_s=30.0)
    scope = {"type": "http", "headers": JSON}
    num_turns = 0
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(Posted(answers, room)(scope, client.receive, client.send))  # type: ignore[arg-type]
        while not running.done():
            num_turns += 1
            await asyncio.sleep(0)
    bodies = [each.get("body", b"") for each in client.sent]
    large = [len(each) for each in bodies if len(each) >= 32_768]
    assert 2 <= len(large) < num_turns
    assert max(large) < 65_536
    body = b"".join(bodies)
    *_, last = [line for line in body.decode().split("\n") if line.startswith("data: {")]
    if isinstance(writers, ResponseWriters):
        (item,) = json.loads(last[6:])["response"]["output"]
        assert len(item["content"][0]["logprobs"]) == Telling.num_tokens
        assert body.count(b'"top_logprobs"') == 5 * Telling.num_tokens + 3


@pytest.mark.parametrize("has_logprobs", [False, True])
async def test_what_may_say_much_at_once_does_not_go_past_the_task(*, has_logprobs: bool) -> None:
    telling = Telling()
    telling.num_tokens = 1
    answers = GenerationAnswers(
        cast(Admission, ADMISSION), cast(Generator, telling), read_response, ResponseWriters()
    )
    members = {"include": ["message.output_text.logprobs"] if has_logprobs else []}
    client = Behind(json.dumps({"model": "m", "input": "p", "stream": True, **members}).encode())
    client.num_given_up = 1  # it takes all
    await Posted(answers, ROOM)({"type": "http", "headers": JSON}, client.receive, client.send)  # type: ignore[arg-type]
    assert (telling.outlet is None) == has_logprobs


class Cuttable(Direct):
    """Remembers whether it was cut."""

    was_cut = False

    def cut(self) -> None:
        self.was_cut = True


class FailingAmid:
    """Fails while a large piece is being written."""

    async def generate(
        self, *_: object, give_up: Callable[[], None], **__: object
    ) -> AsyncGenerator[GenerationEvent, None]:
        asyncio.get_running_loop().call_soon(give_up)
        yield Delta("a" * 200_000, [1], 0, [])
        raise NoWorkerError("gone")


async def test_a_failure_amid_an_event_ends_the_connection() -> None:
    """It would be a part of that event."""
    answers = GenerationAnswers(
        cast(Admission, ADMISSION),
        cast(Generator, FailingAmid()),
        read_completion,
        ChoicesWriters(COMPLETION),
    )
    client = Behind(b'{"model":"m","prompt":"p","stream":true}')
    connection = Cuttable(client)
    scope = {"type": "http", "headers": JSON, CONNECTION: connection}
    await Posted(answers, ROOM)(scope, client.receive, client.send)  # type: ignore[arg-type]
    assert connection.was_cut
    assert len(client.sent) == 2
    assert b"no_worker" not in client.sent[-1]["body"]
