"""The service's handlers on a generator that answers as the test says."""

import asyncio
import math
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from diptych.errors import (
    DiptychError,
    InvalidApiKeyError,
    InvalidRequestError,
    ModelNotFoundError,
    QueueFullError,
)
from diptych.finish_reason import FinishReason
from diptych.open_inference import service_pb2
from diptych.rpc.server import Context
from diptych.tenant import NOBODY, Tenant
from diptych.text.token_text import TokenText
from diptych.token_logprobs import TokenLogprobs
from router.frontend.admission import Admission
from router.frontend.callers.callers import Callers
from router.frontend.generator import Generator
from router.frontend.handed_over import FREE_BYTES, HandedOver
from router.frontend.open_inference.answering import Front
from router.frontend.open_inference.answers import WholeAnswer
from router.frontend.open_inference.asked import read_request
from router.frontend.open_inference.servicer import OpenInferenceServicer
from router.generation.answer import (
    ChoiceFinished,
    Delta,
    GenerationEvent,
    Started,
    Summary,
    Timing,
    Usage,
)
from router.generation.request import GenerationRequest
from tests.unit.router.frontend.open_inference.infer_requests import flag, raw_text, request

USAGE = Usage(num_prompt_tokens=5, num_output_tokens=3, num_cached_tokens=0)
EVENTS: list[GenerationEvent] = [
    Started("r", "m", 1, ()),
    Delta("a", [1, 2], 0, []),
    Delta("b", [3], 2, []),
    ChoiceFinished(FinishReason.STOP),
    Summary(USAGE, Timing()),
]


class Scripted:
    """A generator: it answers, or fails, and counts what was read to its end."""

    def __init__(
        self, error: DiptychError | None = None, events: Sequence[GenerationEvent] = EVENTS
    ) -> None:
        self.requests: list[GenerationRequest] = []
        self.refusals: list[tuple[str, str, str]] = []
        self.deadlines: list[float | None] = []
        self.num_ended = 0
        self._error = error
        self._events = events

    async def generate(
        self, asked: GenerationRequest, *, deadline_s: float | None, **_: object
    ) -> AsyncGenerator[GenerationEvent, None]:
        self.requests.append(asked)
        self.deadlines.append(deadline_s)
        if self._error is not None:
            raise self._error
        for event in self._events:
            yield event
        self.num_ended += 1

    def refused(self, reason: str, metadata: object, *, request_id: str, tenant: Tenant) -> None:
        self.refusals.append((reason, request_id, tenant.name))


class Known:
    """Everybody but who comes without a key."""

    async def tenant(self, given: str | None) -> Tenant:
        if given is None:
            raise InvalidApiKeyError("a key is needed")
        return NOBODY._replace(name=given)


class Call:
    """A call's context."""

    def __init__(self, key: str | None = "me", left_s: float | None = None) -> None:
        self.done: list[Callable[[object], None]] = []
        self._metadata = () if key is None else (("authorization", key),)
        self._left_s = left_s
        self.written: list[service_pb2.ModelStreamInferResponse] = []

    def time_remaining(self) -> float | None:
        return self._left_s

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    async def write(self, response: service_pb2.ModelStreamInferResponse) -> None:
        self.written.append(response)

    def add_done_callback(self, callback: Callable[[object], None]) -> None:
        self.done.append(callback)

    @property
    def context(self) -> Context:
        return cast(Context, self)


def servicer(
    generator: Scripted,
    max_streams: int = 1,
    *,
    callers: Known | None = None,
    handed: HandedOver | None = None,
) -> OpenInferenceServicer:
    admission = SimpleNamespace(
        model=SimpleNamespace(name="m", tokenizer=SimpleNamespace(text=None)),
        max_model_len=100,
        is_ready=True,
    )
    front = Front(
        cast(Admission, admission),
        cast(Generator, generator),
        cast(Callers, callers or Known()),
        1000,
    )
    return OpenInferenceServicer(
        front, max_streams=max_streams, write_s=30.0, handed=handed or HandedOver(2**20)
    )


async def asking(*messages: service_pb2.ModelInferRequest) -> AsyncIterator[bytes]:
    for message in messages:
        yield message.SerializeToString()


def wanting_all(text: str = "Once", **sampling: object) -> service_pb2.ModelInferRequest:
    flags = ("finish_reason", "num_input_tokens", "num_output_tokens")
    return request(*(flag(f"return_{name}") for name in flags), text=text, **sampling)


async def test_an_answer_is_read_to_its_end_and_is_one_response() -> None:
    """Else the record would say that its client had left."""
    generator = Scripted()
    message = wanting_all(max_tokens=3)
    message.id = "mine"
    response = await servicer(generator).ModelInfer(message.SerializeToString(), Call().context)
    assert generator.num_ended == 1
    assert (response.model_name, response.model_version, response.id) == ("m", "1", "mine")
    assert not response.parameters
    assert dict(
        zip((o.name for o in response.outputs), response.raw_output_contents, strict=True)
    ) == {
        "text_output": raw_text("Onceab"),
        "finish_reason": raw_text("stop"),
        "num_input_tokens": (5).to_bytes(4, "little"),
        "num_output_tokens": (3).to_bytes(4, "little"),
    }
    (asked,) = generator.requests
    assert (asked.tenant.name, asked.num_bytes) == ("me", message.ByteSize())


async def test_what_waits_in_grpc_refuses_the_next_before_any_work() -> None:
    """An answer that was made is sent, however much waits by then."""
    large = [Delta("a" * 2 * FREE_BYTES, [1], 0, []), *EVENTS[3:]]
    generator, handed = Scripted(events=large), HandedOver(2 * FREE_BYTES)
    opened, unread = servicer(generator, handed=handed), Call()
    data = request().SerializeToString()
    await opened.ModelInfer(data, unread.context)
    assert handed.num_bytes > FREE_BYTES
    with pytest.raises(QueueFullError):
        await opened.ModelInfer(data, Call().context)
    assert (len(generator.requests), generator.refusals) == (1, [("QUEUE_FULL", "", "me")])
    release = handed.hold("other", 10 * FREE_BYTES)  # while this one is made
    with pytest.raises(QueueFullError):
        await opened.ModelInfer(data, Call("third").context)
    release()
    others = Call("third")
    await opened.ModelInfer(data, others.context)
    for call in (unread, others):
        (taken,) = call.done
        taken(None)
    assert handed.num_bytes == 0


async def test_who_calls_is_asked_once() -> None:
    """A key that ends while its answer is made takes nothing away."""

    class Ending(Known):
        async def tenant(self, given: str | None) -> Tenant:
            asked.append(given)
            if len(asked) > 1:
                raise InvalidApiKeyError("it has ended")
            return await super().tenant(given)

    asked: list[str | None] = []
    data = request().SerializeToString()
    assert await servicer(Scripted(), callers=Ending()).ModelInfer(data, Call().context)
    assert asked == ["me"]


async def test_a_stream_has_a_response_for_each_piece_and_a_last_one() -> None:
    generator, call = Scripted(), Call()
    await servicer(generator).ModelStreamInfer(asking(request(flag("stream"))), call.context)
    responses = [written.infer_response for written in call.written]
    assert [list(r.raw_output_contents) for r in responses] == [
        [raw_text("a")],
        [raw_text("b")],
        [raw_text("")],
    ]
    marks = [r.parameters["triton_final_response"].bool_param for r in responses]
    assert marks == [False, False, True]
    assert generator.num_ended == 1


async def test_on_a_stream_the_one_response_of_an_answer_is_its_last() -> None:
    call = Call()
    await servicer(Scripted()).ModelStreamInfer(asking(request()), call.context)
    (response,) = [written.infer_response for written in call.written]
    assert response.parameters["triton_final_response"].bool_param


async def test_a_sum_of_log_probabilities_is_a_number() -> None:
    """Of a token that the model never says too."""
    never = TokenLogprobs(-math.inf, (), ())
    events = [Delta("a", [1], 0, [], (never,)), ChoiceFinished(FinishReason.STOP), EVENTS[-1]]
    wanted = request(flag("return_cumulative_logprob"))
    front = servicer(Scripted(events=events))
    response = await front.ModelInfer(wanted.SerializeToString(), Call().context)
    (sent,) = response.raw_output_contents[1:]
    assert struct.unpack("<f", sent) == (-9999.0,)


def test_log_probabilities_that_are_no_output_are_not_kept() -> None:
    """The parameter that asks for them has no bound but the context, as nothing carries them."""
    found = TokenLogprobs(-0.5, (1, 2), (-0.5, -1.0))
    for outputs, num_kept in (((), 0), (("cumulative_logprob",), 0), (("logprobs",), 2)):
        flags = (flag(f"return_{name}") for name in outputs)
        message = request(*flags, logprobs=2)
        asked = read_request(message, num_bytes=9, max_model_len=100, tenant=NOBODY)
        answer = WholeAnswer(asked, "m", cast(TokenText, None), is_marked=False)
        answer.send(Delta("ab", [1, 2], 0, [], (found, found)))
        (likely,) = answer._likely
        assert (len(likely.logprobs), likely.num_tokens, likely.total) == (num_kept, 2, -1.0)


async def test_log_probabilities_that_no_response_could_carry_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each token has its own, and those of the likeliest."""
    monkeypatch.setattr("router.frontend.open_inference.answers.MAX_LOGPROBS", 30)
    wanted, generator = flag("return_logprobs"), Scripted(events=EVENTS[-1:])
    fitting = request(wanted, n=2, max_tokens=5, logprobs=2)
    await servicer(generator).ModelInfer(fitting.SerializeToString(), Call().context)
    for large in (
        request(wanted, n=2, max_tokens=5, logprobs=3),
        request(wanted, n=1, max_tokens=31),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            await servicer(generator).ModelInfer(large.SerializeToString(), Call().context)
        assert caught.value.field == "return_logprobs"
    assert len(generator.requests) == 1


async def test_a_refusal_has_the_field_as_its_client_wrote_it() -> None:
    generator = Scripted(InvalidRequestError("is off", field="sampling.top_k"))
    with pytest.raises(InvalidRequestError) as caught:
        await servicer(generator).ModelInfer(request(top_k=3).SerializeToString(), Call().context)
    assert caught.value.field == "sampling_parameters.top_k"
    assert generator.refusals == []  # the generator leaves the record of what it refuses


@pytest.mark.parametrize(
    ("message", "key", "reason"),
    [
        (b"\xff", "me", "REQUEST_INVALID"),
        (b"\0" * 1001, "me", "REQUEST_INVALID"),
        (request(flag("stream")).SerializeToString(), "me", "REQUEST_INVALID"),
        (request(suffix="b").SerializeToString(), "me", "REQUEST_INVALID"),
        (request().SerializeToString(), None, "INVALID_API_KEY"),
    ],
)
async def test_what_cannot_be_read_leaves_a_record(
    message: bytes, key: str | None, reason: str
) -> None:
    generator = Scripted()
    with pytest.raises(DiptychError):
        await servicer(generator).ModelInfer(message, Call(key).context)
    assert generator.refusals == [(reason, "", key or "")]
    assert generator.requests == []


async def test_echoes_that_no_response_could_carry_are_refused_before_any_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.frontend.open_inference.answers.MAX_ECHO_BYTES", 100)
    text = "é" * 30
    generator = Scripted()
    with pytest.raises(InvalidRequestError) as caught:
        await servicer(generator).ModelInfer(
            request(text=text, n=2).SerializeToString(), Call().context
        )
    assert caught.value.field == "exclude_input_in_output"
    assert (generator.requests, len(generator.refusals)) == ([], 1)
    silent = flag("exclude_input_in_output")
    for fitting in (request(text=text), request(silent, text=text, n=2), request(n=2)):
        await servicer(generator).ModelInfer(fitting.SerializeToString(), Call().context)
    assert len(generator.requests) == 3


async def test_the_nearer_deadline_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    generator = Scripted()
    timed = request()
    timed.parameters["timeout"].int64_param = 2_000_000
    for message, left_s in (
        (request(), None),
        (request(), 9.0),
        (timed, None),
        (timed, 9.0),
        (timed, 1.0),
    ):
        call = Call(left_s=left_s)
        await servicer(generator).ModelInfer(message.SerializeToString(), call.context)
    assert generator.deadlines == [None, 109.0, 102.0, 102.0, 101.0]


async def test_streams_are_bounded_and_are_let_in_again() -> None:
    opened = servicer(Scripted(), max_streams=1)

    async def asking_twice() -> AsyncIterator[bytes]:
        with pytest.raises(QueueFullError):
            await opened.ModelStreamInfer(asking(), Call().context)
        yield request().SerializeToString()

    for _ in range(2):
        call = Call()
        await opened.ModelStreamInfer(asking_twice(), call.context)
        assert len(call.written) == 1


async def test_idle_streams_of_one_tenant_keep_no_other_out() -> None:
    """The idlest ends for another's, until who comes holds as many."""
    opened = servicer(Scripted(), max_streams=3)
    ends: list[asyncio.Task[DiptychError | None]] = []

    async def silence() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        for _ in range(3):
            held = opened.ModelStreamInfer(silence(), Call("alice").context)
            ends.append(tasks.create_task(_end_of(held)))
            await asyncio.sleep(0)
        bobs = tasks.create_task(_end_of(opened.ModelStreamInfer(silence(), Call("bob").context)))
        assert isinstance(await ends[0], QueueFullError)
        assert not any(task.done() for task in (*ends[1:], bobs))
        for key in ("alice", "carol", "carol"):
            call = Call(key)
            late = opened.ModelStreamInfer(asking(request()), call.context)
            refused = await _end_of(late)
            assert isinstance(refused, QueueFullError) is (key == "alice")
            assert len(call.written) == (0 if key == "alice" else 1)
        assert isinstance(await ends[1], QueueFullError)
        assert not any(task.done() for task in (ends[2], bobs))
        for task in (ends[2], bobs):
            task.cancel()


async def test_a_stream_with_an_open_request_gives_its_place_to_nobody() -> None:
    opened = servicer(Scripted(), max_streams=1)

    class Busy(Call):
        async def write(self, response: service_pb2.ModelStreamInferResponse) -> None:
            other = opened.ModelStreamInfer(asking(request()), Call("bob").context)
            assert isinstance(await _end_of(other), QueueFullError)
            await super().write(response)

    call = Busy("alice")
    await opened.ModelStreamInfer(asking(request()), call.context)
    assert len(call.written) == 1


async def _end_of(stream: Awaitable[None]) -> DiptychError | None:
    try:
        await stream
    except DiptychError as error:
        return error
    return None


async def test_a_stream_without_a_key_is_not_read() -> None:
    with pytest.raises(InvalidApiKeyError):
        await servicer(Scripted()).ModelStreamInfer(asking(request()), Call(None).context)


async def test_another_model_has_no_description() -> None:
    opened = servicer(Scripted())
    for name, version in (("n", ""), ("m", "2")):
        asked = service_pb2.ModelConfigRequest(name=name, version=version).SerializeToString()
        for method in (opened.ModelConfig, opened.ModelMetadata):
            with pytest.raises(ModelNotFoundError):
                await method(asked, Call().context)
        assert not (await opened.ModelReady(asked, Call().context)).ready
