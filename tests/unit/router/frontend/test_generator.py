"""What an answer counts for where it fails, and that its end is told once it was taken."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.context import Context

from diptych.errors import (
    BlocksExhaustedError,
    DeadlineExceededError,
    DeadlineUnreachableError,
    InvalidRequestError,
    NoWorkerError,
    QueueFullError,
    QueueTimeoutError,
    QuotaExceededError,
    SlowClientError,
    StepFailedError,
    WorkerDrainingError,
)
from diptych.sampling_params import SamplingParams
from diptych.tenant import Limits, Tenant
from router.frontend.generator import Generator, _Answer
from router.frontend.quotas import Quotas
from router.generation.answer import Delta, GenerationEvent, Started, Summary, Timing, Usage
from router.generation.request import GenerationRequest, TextPrompt
from router.request.emitted_tokens import RequestShape
from router.request.resolved import ResolvedRequest
from router.untaken import Untaken

MINUTE_TOKENS = 100
TENANT = Tenant("t", Limits(tokens_per_minute=MINUTE_TOKENS))
SERVICES: Any = SimpleNamespace(config=SimpleNamespace(timers=SimpleNamespace(client_write_s=30.0)))
REQUEST = GenerationRequest(prompt=TextPrompt("a"), request_id="r", tenant=TENANT, num_bytes=0)


class Observer:
    """Remembers how requests ended."""

    request_id = "r"
    received_s = 0.0
    context = Context()

    def __init__(self) -> None:
        self.outcomes: list[str] = []

    def resolved(self, *_: object) -> None: ...

    def ended(self, outcome: str, *_: object, **__: object) -> None:
        self.outcomes.append(outcome)


def builder(placed_s: float | None) -> Any:
    return SimpleNamespace(moments=SimpleNamespace(placed_s=placed_s), num_output_tokens=0)


class Session:
    """Has its events, and an end that it tells of when it is asked once more."""

    timing = Timing()
    finish_reason = None
    model_digest = "m"

    def __init__(self, num_output: int, events: Iterator[GenerationEvent | None] | None = None):
        self.usage = Usage(num_prompt_tokens=10, num_output_tokens=num_output, num_cached_tokens=0)
        self.was_closed = False
        self._events = events or iter(())

    async def next_event(self) -> GenerationEvent | None:
        try:
            return next(self._events)
        except StopIteration:
            raise SlowClientError("it took nothing") from None

    def close(self) -> None:
        self.was_closed = True


@pytest.mark.parametrize(
    ("placed_s", "num_output", "error", "num_counted"),
    [
        (1.0, 2, None, 12),
        (1.0, 2, RuntimeError("a bug"), 12),
        (1.0, 0, RuntimeError("a bug"), 0),
        (1.0, 2, StepFailedError("ours"), 12),
        (1.0, 0, StepFailedError("ours"), 0),
        (None, 0, NoWorkerError("ours"), 0),
        (1.0, 0, DeadlineExceededError("its client's"), 10),
        (1.0, 0, asyncio.CancelledError(), 10),
        (None, 0, asyncio.CancelledError(), 0),
    ],
)
async def test_what_failed_before_there_was_a_token_counts_only_where_its_client_ended_it(
    placed_s: float | None, num_output: int, error: BaseException | None, num_counted: int
) -> None:
    quotas = Quotas(Limits(), lambda: 0.0, lambda what: None)
    observer: Any = Observer()
    answer = _Answer(SERVICES, observer, lambda: None)
    session: Any = Session(num_output)
    ends = nullcontext() if error is None else pytest.raises(type(error))
    with ends, answer.within(quotas, REQUEST, None) as admitted:
        admitted.reserve(50)
        answer._session, answer._builder = session, builder(placed_s)
        if error is not None:
            raise error
    assert num_missing(quotas) == pytest.approx(num_counted)


@pytest.mark.parametrize(("num_output", "num_counted"), [(0, 0), (2, 12)])
async def test_what_is_cut_off_as_another_prompt_has_no_room_gives_all_back_without_a_token(
    num_output: int, num_counted: int
) -> None:
    """It was placed, and looks as if its client had left: the router ended it."""
    quotas = Quotas(Limits(), lambda: 0.0, lambda what: None)
    observer: Any = Observer()
    answer = _Answer(SERVICES, observer, lambda: None)
    session: Any = Session(num_output)
    part, *_ = quotas.admit_all(TENANT, [50])
    answer._session, answer._builder = session, builder(1.0)
    with pytest.raises(asyncio.CancelledError), answer.within(quotas, REQUEST, part):
        raise asyncio.CancelledError
    for _ in range(2):
        part.uncount()
    assert num_missing(quotas) == pytest.approx(num_counted)


@pytest.mark.parametrize(("num_new", "num_counted"), [(0, 0), (1, 14)])
async def test_what_was_resumed_was_paid_for_if_nothing_came_of_it(
    num_new: int, num_counted: int
) -> None:
    """The cluster failed it: it has no token that it had not before."""
    quotas = Quotas(Limits(), lambda: 0.0, lambda what: None)
    observer: Any = Observer()
    answer = _Answer(SERVICES, observer, lambda: None)
    session: Any = Session(3 + num_new)
    session.usage = replace(session.usage, num_resumed_tokens=3)
    ends = pytest.raises(StepFailedError)
    with ends, answer.within(quotas, REQUEST, None) as admitted:
        admitted.reserve(50)
        answer._session, answer._builder = session, builder(1.0)
        raise StepFailedError("ours")
    assert num_missing(quotas) == pytest.approx(num_counted)


@pytest.mark.parametrize(
    ("error", "placed_s", "num_output", "counts"),
    [
        (DeadlineUnreachableError("late", retry_after_s=1.0), None, 0, False),
        (QueueFullError("full", retry_after_s=1.0), None, 0, False),
        (QueueTimeoutError("full", retry_after_s=1.0), None, 0, False),
        (WorkerDrainingError("it shuts down"), None, 0, False),
        (NoWorkerError("none"), None, 0, False),
        (BlocksExhaustedError("full"), 1.0, 0, False),
        (NoWorkerError("lost"), 1.0, 2, True),
        (InvalidRequestError("wrong", field="f"), None, 0, True),
        (StepFailedError("ours"), 1.0, 0, True),
        (asyncio.CancelledError(), None, 0, True),
    ],
)
async def test_who_is_refused_for_want_of_room_has_made_no_request(
    error: BaseException, placed_s: float | None, num_output: int, *, counts: bool
) -> None:
    """So who comes again as told is not locked out; what is wrong with itself counts."""
    refused: list[str] = []
    quotas = Quotas(Limits(), lambda: 0.0, refused.append)
    request = replace(REQUEST, tenant=Tenant("t", Limits(requests_per_minute=1)))
    observer: Any = Observer()
    answer = _Answer(SERVICES, observer, lambda: None)
    session: Any = Session(num_output)
    answer._session, answer._builder = session, builder(placed_s)
    with pytest.raises(type(error)), answer.within(quotas, request, None):
        raise error
    with suppress(QuotaExceededError):
        quotas.admit(request.tenant, 1)
    assert refused == ["requests_per_minute"] * counts


async def test_one_whose_tokens_are_beyond_a_quota_is_given_back_once() -> None:
    quotas = Quotas(Limits(), lambda: 0.0, lambda what: None)
    tenant = Tenant("t", Limits(requests_per_minute=2, tokens_per_minute=MINUTE_TOKENS))
    observer: Any = Observer()
    quotas.admit(tenant, 1).reserve(MINUTE_TOKENS - 1)
    answer = _Answer(SERVICES, observer, lambda: None)
    late = answer.within(quotas, replace(REQUEST, tenant=tenant), None)
    with pytest.raises(QuotaExceededError, match="tokens_per_minute"), late as admitted:
        admitted.reserve(50)
    quotas.admit(tenant, 1)
    with pytest.raises(QuotaExceededError, match="requests_per_minute"):
        quotas.admit(tenant, 1)


def num_missing(quotas: Quotas) -> float:
    """Tokens that the tenant has less than all of a minute."""
    try:
        quotas.admit(TENANT, MINUTE_TOKENS).leave(0)
    except QuotaExceededError as error:
        return (error.retry_after_s or 0.0) * MINUTE_TOKENS / 60
    return 0.0


@pytest.mark.parametrize("is_whole", [False, True])
async def test_an_answer_whose_end_was_not_taken_did_not_end_well(
    monkeypatch: pytest.MonkeyPatch, *, is_whole: bool
) -> None:
    """Of one that is written as a whole its writer minds how long its end takes."""
    opened: list[_Answer] = []
    session, observer = Session(1, iter((Delta("a", [1], 0, []), None))), Observer()

    @contextmanager
    def hold(tenant: Tenant, num_bytes: int) -> Iterator[None]:
        yield

    async def admit(*_: object, **__: object) -> object:
        shape = SimpleNamespace(prompt_ids=(1,))
        return SimpleNamespace(num_tokens_at_most=1, shape=shape, sampling=SimpleNamespace(seed=1))

    def open_(answer: _Answer, *_: object) -> Session:
        made: Any = session
        answer._session, answer._builder = made, builder(1.0)
        opened.append(answer)
        return session

    monkeypatch.setattr(_Answer, "open", open_)
    admission: Any = SimpleNamespace(hold=hold, admit=admit, model=SimpleNamespace(name="m"))
    nothing: Any = None
    quotas = Quotas(Limits(), lambda: 0.0, lambda what: None)
    generator = Generator(admission, quotas, SERVICES, nothing, Untaken(lambda: 0.0))
    observe: Callable[..., object] = lambda *_, **__: observer  # noqa: E731
    monkeypatch.setattr(generator, "_observe", observe)
    events = generator.generate(REQUEST, is_whole=is_whole)
    began, *later = [await anext(events) for _ in range(3)]
    assert opened[0].watch.is_writing != is_whole
    assert isinstance(began, Started)
    assert began.model_digest == "m"
    assert [type(event) for event in later] == [Delta, Summary]
    with pytest.raises(SlowClientError):
        await anext(events)
    assert (observer.outcomes, session.was_closed) == (["CLIENT_TOO_SLOW"], True)


async def test_a_client_that_is_cut_off_while_its_next_request_is_admitted_gets_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a connection that is kept: nobody is asked for what nobody would count."""
    untaken, observer = Untaken(lambda: 0.0, 2**20), Observer()
    taker, other = untaken.open("kept"), untaken.open("other")
    taker.wait(600_000)  # the end of the answer before it

    @contextmanager
    def hold(tenant: Tenant, num_bytes: int) -> Iterator[None]:
        yield

    async def admit(*_: object, **__: object) -> object:
        other.wait(600_000)
        await asyncio.sleep(0)
        return SimpleNamespace(num_tokens_at_most=1)

    admission: Any = SimpleNamespace(hold=hold, admit=admit)
    nothing: Any = None
    quotas = Quotas(Limits(), lambda: 0.0, lambda what: None)
    generator = Generator(admission, quotas, SERVICES, nothing, untaken)
    monkeypatch.setattr(generator, "_observe", lambda *_, **__: observer)
    monkeypatch.setattr(_Answer, "open", lambda *_: pytest.fail("workers were asked"))
    with pytest.raises(SlowClientError):
        await anext(generator.generate(REQUEST, taker=taker))
    assert (taker.was_cut, other.was_cut) == (True, False)
    assert observer.outcomes == ["CLIENT_TOO_SLOW"]


@pytest.mark.parametrize("num_best", [1, 3])
async def test_the_other_choices_are_asked_for_with_the_first_ones_weights(
    monkeypatch: pytest.MonkeyPatch, num_best: int
) -> None:
    asked: list[str] = []

    class Choice(Session):
        is_under_way, decode_worker = True, None

        def __init__(self, _: str, request: ResolvedRequest, *__: object, **___: object) -> None:
            super().__init__(1)
            asked.append(request.model_digest)

        def start(self, *, front: bool = False) -> None: ...

        def keep_model(self) -> str:
            return self.model_digest

        def poll(self) -> GenerationEvent:
            raise SlowClientError("it took nothing")

    monkeypatch.setattr("router.frontend.generator.Session", Choice)
    made: Any = SimpleNamespace(check_resumed=lambda: None)
    observer: Any = Observer()
    shape, sampling = RequestShape(prompt_ids=(1,), max_tokens=4), SamplingParams(seed=1)
    request = ResolvedRequest(shape=shape, sampling=sampling, num_choices=3, num_best=num_best)
    answer = _Answer(SERVICES, observer, lambda: None)
    session = answer.open(request, lambda choice: made, None)
    with pytest.raises(SlowClientError):
        await session.next_event()
    assert asked == ["", "m", "m"]
