"""Several prompts of one body: let in as one, and answered on the places their tenant has."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from diptych.errors import (
    DiptychError,
    InvalidRequestError,
    NoWorkerError,
    QueueFullError,
    SlowClientError,
)
from diptych.finish_reason import FinishReason
from diptych.sampling_params import NOTHING_SAID, SamplingParams
from diptych.tenant import Limits, Tenant
from router.config import RouterConfig
from router.frontend.admission import Admission
from router.frontend.generator import Generator
from router.frontend.http.answer_form import COMPLETION
from router.frontend.http.choices_form import ChoicesWriters
from router.frontend.http.completion_request import read_completion
from router.frontend.http.exchange import TENANT, BodyRoom
from router.frontend.http.generation import GenerationAnswers
from router.frontend.http.posted import Posted
from router.frontend.quotas import Admitted, Places, Quotas
from router.frontend.told_logprobs import ToldLogprobs
from router.generation.answer import ChoiceFinished, Delta, GenerationEvent, Summary, Usage
from router.generation.request import GenerationRequest
from router.request.emitted_tokens import RequestShape
from router.request.resolved import ResolvedRequest

UNTIMED: Any = None
ROOM = BodyRoom(max_bytes=10**6, max_all_bytes=10**6, patience_s=30.0)


class Door(Admission):
    """Of a model without tokens; remembers how many bytes were ever open."""

    def __init__(self, **settings: Any) -> None:
        model: Any = SimpleNamespace(
            name="m",
            tokenizer=SimpleNamespace(text=None, max_model_len=100),
            recommended=NOTHING_SAID,
        )
        cluster: Any = SimpleNamespace(max_model_len=None)
        super().__init__(model, cluster, RouterConfig(model="m", decode=["a:1"], **settings))
        self.most_bytes = self._num_bytes = 0

    async def check(self, request: GenerationRequest, deadline_s: float | None) -> ResolvedRequest:
        shape = RequestShape(prompt_ids=(1,), max_tokens=1)
        num_logprobs = ToldLogprobs.of(request, 1).check(1)
        return ResolvedRequest(shape=shape, sampling=SamplingParams(), num_logprobs=num_logprobs)

    @contextmanager
    def hold(self, tenant: Tenant, num_bytes: int) -> Iterator[None]:
        with super().hold(tenant, num_bytes):
            self._num_bytes += num_bytes
            self.most_bytes = max(self.most_bytes, self._num_bytes)
            try:
                yield
            finally:
                self._num_bytes -= num_bytes


class Answers:
    """A generator that asks quotas and door as the real one does, and no worker."""

    def __init__(self, door: Door, limits: Limits) -> None:
        self.num_begun = 0
        self.drains = False
        self.failure: DiptychError | None = None
        self.refusals: list[str] = []
        self.held: asyncio.Event | None = None
        """What all but the first wait for."""
        self.tenants: set[Tenant] = set()
        self.at_most = 0  # places that were asked for last
        self.quotas = Quotas(limits, lambda: 0.0, lambda what: None)
        self._door = door

    def take_places(self, tenant: Tenant, num_requests: int, at_most: int) -> Places:
        self.at_most = at_most
        return self.quotas.take_places(tenant, num_requests, at_most)

    def admit_all(self, tenant: Tenant, num_tokens: Sequence[int]) -> Sequence[Admitted]:
        return self.quotas.admit_all(tenant, num_tokens)

    def refused(self, reason: str, *_: object, **__: object) -> None:
        self.refusals.append(reason)

    async def generate(
        self,
        request: GenerationRequest,
        *,
        part: Admitted | None = None,
        give_up: Callable[[], None],
        **_: object,
    ) -> AsyncGenerator[GenerationEvent, None]:
        admitted = part or self.quotas.admit(request.tenant, 1)
        self.tenants.add(request.tenant)
        try:
            with self._door.hold(request.tenant, request.num_bytes):
                if part is None:
                    self._door.check_open(None)
                self.num_begun += 1
                is_first = self.num_begun == 1
                if self.drains:
                    self._door.drain()
                if self.held is not None and not is_first:
                    await self.held.wait()
                yield Delta("a", [1], 0, [])
                if self.failure is not None and is_first:
                    asyncio.get_running_loop().call_soon(give_up)
                    yield Delta("b", [2], 1, [])
                    raise self.failure
                if self.failure is not None:
                    await asyncio.Event().wait()
                yield ChoiceFinished(FinishReason.STOP)
                yield Summary(
                    Usage(num_prompt_tokens=1, num_output_tokens=1, num_cached_tokens=0), UNTIMED
                )
        finally:
            admitted.leave(1)


class Client:
    """Takes what it is sent; one that is behind only once the first piece was given up."""

    def __init__(self, num_prompts: int, members: dict[str, Any], *, is_behind: bool) -> None:
        self.sent: list[dict[str, Any]] = []
        self.look: Callable[[], object] = list
        """Called at each message, before it is taken."""
        said = {"model": "m", "prompt": ["p"] * num_prompts, **members}
        self.body = json.dumps(said).encode()
        self._bodies = [{"type": "http.request", "body": self.body}]
        self._is_behind = is_behind

    async def receive(self) -> dict[str, Any]:
        if not self._bodies:
            await asyncio.Event().wait()
        return self._bodies.pop()

    async def send(self, message: dict[str, Any]) -> None:
        if len(self.sent) == 2 and self._is_behind:
            self._is_behind = False
            await asyncio.Event().wait()
        self.look()
        self.sent.append(message)

    @property
    def told(self) -> Any:
        """The body in one piece."""
        return json.loads(b"".join(each.get("body", b"") for each in self.sent))


class World:
    def __init__(self, limits: Limits = Limits(), **settings: Any) -> None:  # noqa: B008 - it is immutable
        self.tenant = Tenant("t", limits)
        self.door = Door(**settings)
        self.answers = Answers(self.door, limits)

    async def ask(
        self,
        num_prompts: int,
        *,
        is_behind: bool = False,
        look: Callable[[], object] = list,
        **members: Any,
    ) -> Client:
        client = Client(num_prompts, members, is_behind=is_behind)
        client.look = look
        answers = GenerationAnswers(
            self.door,
            cast(Generator, self.answers),
            read_completion,
            ChoicesWriters(COMPLETION),
        )
        scope = {
            "type": "http",
            "headers": [(b"content-type", b"application/json")],
            TENANT: self.tenant,
        }
        async with asyncio.timeout(10):
            await Posted(answers, ROOM)(scope, client.receive, client.send)  # type: ignore[arg-type]
        assert self.door.num_open == 0
        return client

    def num_free(self) -> int:
        """Places of a tenant that has twenty at the most."""
        places = self.answers.quotas.take_places(self.tenant, 1, 20)
        num = places.num
        places.leave()
        return num


async def test_others_are_served_between_the_checks_of_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There may be many, and each may take a while."""
    turns: list[int] = [0]
    check = Door.check

    async def turn() -> None:
        while True:
            await asyncio.sleep(0)
            turns[-1] += 1

    async def checked(self: Door, *asked: Any) -> ResolvedRequest:
        turns.append(0)
        return await check(self, *asked)

    monkeypatch.setattr(Door, "check", checked)
    async with asyncio.TaskGroup() as tasks:
        others = tasks.create_task(turn())
        await World().ask(20)
        others.cancel()
    assert len(turns) == 21
    assert min(turns) > 0


@pytest.mark.parametrize("max_concurrent", [1, 8, 20])
async def test_all_are_answered_on_the_places_that_there_are(max_concurrent: int) -> None:
    world = World(Limits(max_concurrent=max_concurrent))
    client = await world.ask(20)
    assert len(client.told["choices"]) == world.answers.num_begun == 20
    assert world.num_free() == max_concurrent
    assert world.answers.tenants == {world.tenant}


async def test_a_place_that_is_needed_no_more_is_anothers() -> None:
    world = World(Limits(max_concurrent=3))
    world.answers.held = asyncio.Event()
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        tasks.create_task(world.ask(2))
        while world.answers.num_begun < 2:
            await asyncio.sleep(0)
        while world.num_free() < 2:  # the first is answered, the other is not
            await asyncio.sleep(0)
        world.answers.held.set()
    assert world.num_free() == 3


async def test_one_place_is_kept_until_the_client_has_the_answer() -> None:
    world = World(Limits(max_concurrent=3))
    seen: list[tuple[int, int]] = []
    await world.ask(5, look=lambda: seen.append((world.num_free(), world.door.num_open)))
    assert seen == [(2, 1)] * 2, "at its head, and at its body"
    assert world.num_free() == 3


async def test_they_are_refused_only_where_there_is_no_place() -> None:
    world = World(Limits(max_concurrent=8))
    others = world.answers.quotas.take_places(world.tenant, 7, 7)
    assert len((await world.ask(9)).told["choices"]) == 9
    last = world.answers.quotas.take_places(world.tenant, 1, 1)
    client = await world.ask(9)
    assert (client.sent[0]["status"], world.answers.refusals) == (429, ["QUOTA_EXCEEDED"])
    assert world.answers.num_begun == 9
    others.leave()
    last.leave()
    assert world.num_free() == 8


@pytest.mark.parametrize(
    ("limits", "quota"),
    [
        (Limits(requests_per_minute=10), "requests_per_minute"),
        (Limits(tokens_per_minute=15), "tokens_per_minute"),
    ],
)
async def test_a_quota_lets_all_in_or_none(limits: Limits, quota: str) -> None:
    """What is left for some of them is not spent, and those who need no more have it."""
    world = World(limits)
    assert len((await world.ask(6)).told["choices"]) == world.answers.num_begun == 6
    client = await world.ask(5)
    assert (client.sent[0]["status"], world.answers.refusals) == (429, ["QUOTA_EXCEEDED"])
    assert client.told["error"]["code"] == "quota_exceeded"
    assert quota in client.told["error"]["message"]
    assert world.answers.num_begun == 6
    assert len((await world.ask(4)).told["choices"]) == 4


async def test_prompts_that_never_begin_use_no_quota() -> None:
    world = World(Limits(max_concurrent=1, requests_per_minute=10))
    world.answers.failure = NoWorkerError("gone")
    assert (await world.ask(8)).sent[0]["status"] == 503
    world.answers.failure = None
    assert world.answers.num_begun == 1
    assert len((await world.ask(9)).told["choices"]) == 9


async def test_where_there_is_no_room_for_one_none_of_those_cut_off_for_it_counts() -> None:
    """So it can come again as it was told, though its tenant may make no more in a minute."""
    world = World(Limits(requests_per_minute=16))

    async def full(
        request: GenerationRequest, *, part: Admitted, **_: object
    ) -> AsyncGenerator[GenerationEvent, None]:
        world.answers.num_begun += 1
        is_last = world.answers.num_begun == 16
        try:
            if not is_last:
                await asyncio.Event().wait()
            raise QueueFullError("full", retry_after_s=1.0)
            yield  # it is a generator
        finally:
            if is_last:
                part.withdraw()
            else:
                part.leave(0)

    world.answers.generate = full  # type: ignore[method-assign, assignment]
    client = await world.ask(16)
    assert (client.sent[0]["status"], world.answers.num_begun) == (429, 16)
    del world.answers.generate
    assert len((await world.ask(16)).told["choices"]) == 16


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (QueueFullError("full", retry_after_s=1.0), 429),
        (InvalidRequestError("is too long", field="prompt"), 400),
    ],
    ids=["full", "wrong"],
)
async def test_one_that_is_refused_leaves_the_record_of_the_call(
    error: DiptychError, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else would say that it came."""
    num_checked, check = 0, Door.check

    async def checked(self: Door, *asked: Any) -> ResolvedRequest:
        nonlocal num_checked
        num_checked += 1
        if num_checked == 2:
            raise error
        return await check(self, *asked)

    monkeypatch.setattr(Door, "check", checked)
    world = World()
    client = await world.ask(3)
    assert (client.sent[0]["status"], world.answers.refusals) == (status, [error.reason])
    assert world.answers.num_begun == 0


async def test_a_drain_waits_for_prompts_that_were_let_in() -> None:
    world = World()
    world.answers.drains = True
    assert len((await world.ask(17)).told["choices"]) == 17
    client = await world.ask(2)
    assert (client.sent[0]["status"], world.answers.refusals) == (503, ["WORKER_DRAINING"])
    assert world.answers.num_begun == 17


async def test_a_client_that_is_merely_behind_is_told_what_failed() -> None:
    world = World(Limits(max_concurrent=20))
    world.answers.failure = NoWorkerError("gone")
    client = await world.ask(3, is_behind=True, stream=True)
    told, end, _ = client.sent[-1]["body"].decode().split("\n\n")
    assert json.loads(told.removeprefix("data: "))["error"]["code"] == "no_worker"
    assert (end, client.sent[-1]["more_body"]) == ("data: [DONE]", False)
    assert world.num_free() == 20


async def test_a_client_that_takes_nothing_is_told_nothing() -> None:
    world = World(Limits(max_concurrent=20))
    world.answers.failure = SlowClientError("full")
    assert len((await world.ask(3, is_behind=True, stream=True)).sent) == 2
    assert world.num_free() == 20


async def test_all_bytes_of_the_body_count_once() -> None:
    world = World()
    client = await world.ask(40, user="x" * 1000)
    assert world.door.most_bytes == len(client.body)


async def test_log_probabilities_of_all_prompts_have_one_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.frontend.http.generation.MAX_LOGPROBS", 20)
    world = World()
    assert len((await world.ask(4, prompt_logprobs=4)).told["choices"]) == 4
    client = await world.ask(5, prompt_logprobs=4)
    assert client.told["error"]["param"] == "prompt_logprobs"
    assert world.answers.num_begun == 4, "no worker was asked"


@pytest.mark.parametrize(
    ("field", "theirs"),
    [
        ("sampling.constraint.json_schema", "response_format.json_schema.schema"),
        ("text", "prompt[0]"),
    ],
)
async def test_what_a_prompt_is_refused_for_has_the_clients_names(field: str, theirs: str) -> None:
    world = World()
    world.answers.failure = InvalidRequestError("cannot be", field=field)
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
    client = await world.ask(2, response_format=schema)
    assert client.told["error"]["param"] == theirs


async def test_who_was_sent_nothing_yet_is_told_that_too_much_was_unread() -> None:
    """Of an answer in one piece nobody takes anything before its end."""
    world = World(Limits(max_concurrent=20))
    world.answers.failure = SlowClientError("full")
    client = await world.ask(3)
    assert client.sent[0]["status"] == 408
    assert client.told["error"]["code"] == "client_too_slow"
    assert world.num_free() == 20


@pytest.mark.parametrize(("max_queue", "at_once"), [(0, 1), (2, 3), (15, 16), (256, 16)])
async def test_no_more_prompts_of_a_body_are_under_way_than_may_wait(
    max_queue: int, at_once: int
) -> None:
    """Else they are refused for want of room by themselves, however idle the workers are."""
    world = World(max_queue=max_queue)
    assert len((await world.ask(40)).told["choices"]) == 40
    assert world.answers.at_most == at_once
