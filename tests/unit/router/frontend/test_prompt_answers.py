"""Work on prompts alone is counted and refused as any request, before a worker is asked."""

import asyncio
from array import array
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from diptych.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    NoWorkerError,
    QuotaExceededError,
)
from diptych.request_class import RequestClass
from diptych.telemetry.tracing import Tracing
from diptych.tenant import NOBODY, Classes, Limits, Tenant
from router.client_settings import ClassesSettings, Objectives
from router.frontend import prompt_answers
from router.frontend.prompt_answers import PromptAnswers
from router.frontend.prompt_jobs import Errand, Job, JobResult
from router.frontend.quotas import Quotas
from router.frontend.service_classes import ServiceClasses
from router.generation.prompt_work import Embeddings, EmbedRequest, ScoreRequest, Scores
from router.generation.request import GenerationRequest, TextPrompt, TokenPrompt
from router.placement.claim import Claim
from router.request.prompt_told import WantedLogprobs, WantedStates
from router.telemetry import Telemetry
from tests.unit.router.test_telemetry import make_metrics
from tests.unit.router.told_workers import ToldWorkers

REALTIME, STANDARD, BATCH = RequestClass
TENANT = Tenant("t", Limits(tokens_per_minute=20, max_concurrent=1))


class FakeAdmission:
    """A text of n characters has n tokens."""

    max_model_len = 100

    def __init__(self) -> None:
        self.model = SimpleNamespace(name="m", tokenizer=None, pooling=None, vector_size=4)
        self.classes = ClassesSettings()
        self.is_cut_off = False
        self.read: list[TextPrompt] = []
        self.tenants: set[Tenant] = set()

    @contextmanager
    def hold(self, tenant: Tenant, num_bytes: int) -> Iterator[None]:
        yield

    def claim_of_prompts(self, tenant: Tenant) -> Claim:
        soon = Objectives(ttft_ms=1.0, tpot_ms=1.0)
        return ServiceClasses(self.classes, soon, lambda: 0.0).claim_without_objectives(tenant)

    async def admit_prompts(self, what: str, deadline_s: float | None) -> None: ...

    async def tokenize(self, request: GenerationRequest, deadline_s: float | None) -> list[int]:
        prompt = request.prompt
        self.tenants.add(request.tenant)
        if isinstance(prompt, TokenPrompt):
            return list(prompt.token_ids)
        assert isinstance(prompt, TextPrompt)
        self.read.append(prompt)
        if not prompt.text:
            raise InvalidRequestError("is empty", field="text")
        return list(range(len(prompt.text)))


class FakeJobs:
    """Prefill workers that find every token equally likely, or fail."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.claims: list[Claim] = []
        self.error: NoWorkerError | None = None

    async def run(self, jobs: Sequence[Job], errand: Errand) -> list[JobResult]:
        if self.error is not None:
            raise self.error
        self.jobs += jobs
        self.claims.append(errand.claim)
        results = []
        for job in jobs:
            logprobs = array("f")
            if isinstance(job.wanted, WantedLogprobs):
                logprobs.extend([-1.0] * (job.num_tokens - job.wanted.first_position))
            states = array("f", (3.0, 4.0, 0.0, 9.0))
            results.append(JobResult(logprobs, is_greedy=True, states=states, num_cached_tokens=2))
        return results


class Rig:
    def __init__(self) -> None:
        self.admission, self.jobs = FakeAdmission(), FakeJobs()
        services: Any = SimpleNamespace()
        admission: Any = self.admission
        metrics = make_metrics(CollectorRegistry())
        telemetry = Telemetry(metrics, Tracing("test"), ToldWorkers(), "m", slow_s=None)
        self.answers = PromptAnswers(
            admission,
            Quotas(Limits(), lambda: 0.0, lambda quota: None),
            services,
            telemetry,
        )
        jobs: Any = self.jobs
        self.answers._jobs = jobs

    async def score(self, request: ScoreRequest) -> Scores:
        with self.answers.answering(request) as call:
            return await self.answers.score(call)

    async def embed(self, request: EmbedRequest) -> Embeddings:
        with self.answers.answering(request) as call:
            return await self.answers.embed(call)


def score(prompt: str | None, *continuations: str) -> ScoreRequest:
    return ScoreRequest(
        prompt=None if prompt is None else TextPrompt(prompt),
        continuations=[TextPrompt(each) for each in continuations],
        tenant=TENANT,
        num_bytes=9,
    )


def embed(*texts: str, dimensions: int | None = None) -> EmbedRequest:
    inputs = [TextPrompt(text) for text in texts]
    return EmbedRequest(inputs=inputs, dimensions=dimensions, tenant=TENANT, num_bytes=9)


async def test_texts_are_tokenised_in_their_tenants_turn() -> None:
    rig = Rig()
    await rig.score(score("ab", "c"))
    await rig.embed(embed("a"))
    assert rig.admission.tenants == {TENANT}


async def test_of_each_continuation_its_own_tokens_are_told() -> None:
    rig = Rig()
    made = await rig.score(score("abcde", "xy", "z"))
    assert [list(each.logprobs) for each in made.scores] == [[-1.0, -1.0], [-1.0]]
    assert [job.wanted for job in rig.jobs.jobs] == [
        WantedLogprobs(5, 7, 1),
        WantedLogprobs(5, 6, 1),
    ]
    assert [text.is_continuation for text in rig.admission.read] == [False, True, True]
    assert made.usage.num_prompt_tokens == 8, "the prompt counts once"
    (alone,) = (await rig.score(score(None, "abcd"))).scores
    assert len(alone.logprobs) == 3
    assert not rig.admission.read[-1].is_continuation


async def test_no_end_is_added_between_a_prompt_and_what_continues_it() -> None:
    rig = Rig()
    await rig.score(score("ab", "c"))
    prompt, continuation = rig.admission.read
    assert prompt.is_continued
    assert continuation.is_continuation
    await rig.score(score(None, "cd"))
    await rig.embed(embed("a"))
    assert not any(each.is_continued for each in rig.admission.read[2:]), "they are whole texts"


async def test_continuations_share_the_prompt_that_is_before_them() -> None:
    rig = Rig()
    rig.admission.max_model_len = 50_000
    prompt, unbound = TokenPrompt(range(40_000)), Tenant("u")
    inputs = [TextPrompt("xy")] * 2048
    asked = ScoreRequest(prompt=prompt, continuations=inputs, tenant=unbound, num_bytes=9)
    made = await rig.score(asked)
    assert made.usage.num_prompt_tokens == 40_000 + 2 * 2048
    first, *others = rig.jobs.jobs
    assert all(job.before is first.before for job in others), "none has a copy"
    wanted = WantedLogprobs(40_000, 40_002, 1)
    assert first == Job(array("I", [0, 1]), wanted, list(range(40_000)))


async def test_no_job_is_made_of_what_a_quota_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    await rig.embed(embed("a" * 15))
    made: list[object] = []
    monkeypatch.setattr(prompt_answers, "_score_job", lambda *given: made.append(given))
    with pytest.raises(QuotaExceededError):
        await rig.score(score("a" * 15, "xy", "z"))
    assert not made


async def test_a_vector_is_cut_and_then_scaled() -> None:
    rig = Rig()
    made = await rig.embed(embed("abc", dimensions=2))
    assert [list(vector) for vector in made.vectors] == [[0.6, 0.8]]
    assert rig.jobs.jobs[0].wanted == WantedStates(2, 4), "the last token's, unless somebody says"
    with pytest.raises(InvalidRequestError) as caught:
        await rig.embed(embed("abc", dimensions=5))
    assert caught.value.field == "dimensions"
    assert len(rig.jobs.jobs) == 1, "it cost no worker anything"


async def test_the_numbers_of_one_answer_are_bounded() -> None:
    rig = Rig()
    rig.admission.model.vector_size = prompt_answers.MAX_NUMBERS // 2
    with pytest.raises(InvalidRequestError) as caught:
        await rig.embed(embed("a", "b", "c"))
    assert caught.value.field == "inputs"
    assert not rig.jobs.jobs
    await rig.embed(embed("a", "b"))
    await rig.embed(embed("a", "b", "c", dimensions=4))


async def test_an_answer_has_no_more_numbers_than_its_writer_has_room_for() -> None:
    rig, asked = Rig(), embed("a", "b", "c")
    with (
        pytest.raises(InvalidRequestError, match=r"3 items of 4 dimensions.* 11") as caught,
        rig.answers.answering(asked, max_numbers=11),
    ):
        pass
    assert caught.value.field == "inputs"
    with rig.answers.answering(asked, max_numbers=12) as call:
        await rig.answers.embed(call)


async def test_the_log_probabilities_of_one_answer_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    monkeypatch.setattr(prompt_answers, "MAX_SCORED", 5)
    fitting = [score(None, "abcd", "abc"), score("ab", "abcd", "a")]
    for asked in fitting:
        await rig.score(asked)
    num_jobs = len(rig.jobs.jobs)
    for asked in (score(None, "abcd", "abcd"), score("ab", "abcd", "ab")):
        with pytest.raises(InvalidRequestError, match="more than 5") as caught:
            await rig.score(asked)
        assert caught.value.field == "continuations"
    assert len(rig.jobs.jobs) == num_jobs, "they cost no worker anything"


async def test_a_text_that_is_too_long_is_refused_by_its_place() -> None:
    """No worker would ever take it."""
    rig, unbound = Rig(), Tenant("u")
    longest, long = "a" * 99, "a" * 100
    await rig.embed(replace(embed(longest), tenant=unbound))
    await rig.score(replace(score(None, longest), tenant=unbound))
    with pytest.raises(InvalidRequestError) as caught:
        await rig.embed(replace(embed("a", long), tenant=unbound))
    assert caught.value.field == "inputs[1].text"
    for asked, field in (
        (score(None, "ab", long), "continuations[1].text"),
        (score(long, "a"), "text"),
        (score("ab", longest), "continuations[0]"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            await rig.score(replace(asked, tenant=unbound))
        assert caught.value.field == field
    assert len(rig.jobs.jobs) == 2


@pytest.mark.parametrize(
    ("answer", "num_expected"),
    [
        (lambda rig: rig.embed(embed(*"a" * 20)), 40),
        (lambda rig: rig.score(score("a", *"b" * 19)), 20),
    ],
)
async def test_other_tasks_run_while_texts_are_read_and_vectors_scaled(
    answer: Callable[[Rig], Coroutine[Any, Any, object]], num_expected: int
) -> None:
    num_turns = 0
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(answer(Rig()), name="answer")
        while not running.done():
            num_turns += 1
            await asyncio.sleep(0)
    assert num_turns >= num_expected


async def test_what_is_wrong_is_named_by_its_place() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await Rig().embed(embed("a", ""))
    assert caught.value.field == "inputs[1].text"
    with pytest.raises(InvalidRequestError) as caught:
        await Rig().score(score(None, "ab", "a"))
    assert caught.value.field == "continuations[1]"


async def test_a_tenants_quota_counts_what_was_computed() -> None:
    rig = Rig()
    rig.jobs.error = NoWorkerError("gone")
    for _ in range(3):
        with pytest.raises(NoWorkerError):
            await rig.embed(embed("a" * 15))
    rig.jobs.error = None
    await rig.embed(embed("a" * 15))
    with pytest.raises(QuotaExceededError):
        await rig.embed(embed("a" * 15))
    assert len(rig.jobs.jobs) == 1
    await rig.score(score("abc", "de"))


@pytest.mark.parametrize(("num_placed", "num_left"), [(0, 20), (12, 8)])
@pytest.mark.parametrize("is_late", [True, False])
async def test_what_no_worker_was_asked_for_is_not_paid(
    num_placed: int, num_left: int, *, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline passes, or the client leaves, while it waits."""
    rig = Rig()

    async def wait(jobs: Sequence[Job], errand: Errand) -> list[JobResult]:
        errand.num_placed_tokens = num_placed
        if is_late:
            raise DeadlineExceededError("it passed")
        raise asyncio.CancelledError

    with monkeypatch.context() as patched:
        patched.setattr(rig.jobs, "run", wait)
        with pytest.raises(DeadlineExceededError if is_late else asyncio.CancelledError):
            await rig.embed(embed("x" * 20))
    await rig.embed(embed("x" * num_left))
    with pytest.raises(QuotaExceededError):
        await rig.embed(embed("x"))


async def test_nothing_is_read_of_what_is_not_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()

    async def refuse(what: str, deadline_s: float | None) -> None:
        raise NoWorkerError(what)

    monkeypatch.setattr(rig.admission, "admit_prompts", refuse)
    with pytest.raises(NoWorkerError, match="Score"):
        await rig.score(score("abc", "de"))
    with pytest.raises(NoWorkerError, match="Embed"):
        await rig.embed(embed("abc"))
    assert not rig.admission.tenants


async def test_a_call_for_which_there_is_no_worker_is_no_request_of_its_tenants() -> None:
    rig, tenant = Rig(), Tenant("a", Limits(requests_per_minute=1))
    asked = replace(embed("abc"), tenant=tenant)
    rig.jobs.error = NoWorkerError("gone")
    for _ in range(2):
        with pytest.raises(NoWorkerError):
            await rig.embed(asked)
    rig.jobs.error = None
    await rig.embed(asked)
    with pytest.raises(QuotaExceededError):
        await rig.embed(asked)


@pytest.mark.parametrize(
    ("classes", "settings", "expected"),
    [
        (Classes(), ClassesSettings(), STANDARD),
        (Classes(highest_class=BATCH), ClassesSettings(), BATCH),
        (Classes(REALTIME, STANDARD), ClassesSettings(), STANDARD),
        (Classes(default_class=REALTIME), ClassesSettings(), REALTIME),
        (Classes(), ClassesSettings(default=BATCH), BATCH),
        (Classes(), ClassesSettings(default=REALTIME), REALTIME),
        (Classes(), ClassesSettings(highest=BATCH), BATCH),
        (Classes(default_class=REALTIME), ClassesSettings(highest=STANDARD), STANDARD),
    ],
)
async def test_work_on_prompts_claims_what_its_tenant_may_have_and_no_objectives(
    classes: Classes, settings: ClassesSettings, expected: RequestClass
) -> None:
    rig = Rig()
    rig.admission.classes = settings
    tenant = Tenant("a", classes=classes)
    await rig.embed(replace(embed("abc"), tenant=tenant))
    await rig.score(replace(score("abc", "de"), tenant=tenant))
    assert rig.jobs.claims == [Claim(expected, "a")] * 2


async def test_where_nobody_is_known_the_routers_default_holds() -> None:
    rig = Rig()
    rig.admission.classes = ClassesSettings(default=BATCH)
    await rig.embed(replace(embed("abc"), tenant=NOBODY))
    assert rig.jobs.claims == [Claim(BATCH, "")]
