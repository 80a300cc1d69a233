"""What is computed of several prompts for one call, while weights are replaced."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from diptych.errors import DeadlineExceededError, ModelChangedError
from diptych.token_logprobs import PromptLogprobs, TokenLogprobs
from router.config import RouterConfig
from router.frontend import prompt_jobs
from router.frontend.prompt_jobs import Errand, Job, JobResult, PromptJobs
from router.placement.claim import NO_CLAIM
from router.request.prompt_told import WantedLogprobs, WantedStates

JOBS = [Job((1, 2, 3), WantedStates(1)), Job((4, 5), WantedStates(1)), Job((6,), WantedStates(1))]


class FakeSession:
    """A request that tells nothing of its prompt, of the weights that come next."""

    digests: list[str]

    def __init__(self, *args: Any, **options: Any) -> None:
        self.model_digest = self.digests.pop(0)
        self.usage = SimpleNamespace(num_cached_tokens=0)

    def start(self) -> None: ...

    async def next_event(self) -> None: ...

    def close(self) -> None: ...


async def run(
    monkeypatch: pytest.MonkeyPatch,
    jobs: list[Job],
    session: type,
    errands: list[Errand] | None = None,
    **settings: Any,
) -> list[JobResult]:
    monkeypatch.setattr(prompt_jobs, "Session", session)
    observer: Any = None
    tokenizer: Any = SimpleNamespace(decoder=lambda *args: None)
    services: Any = SimpleNamespace(config=RouterConfig(model="m", decode=["a:1"], **settings))
    errand = Errand("r", b"", None, observer, NO_CLAIM)
    if errands is not None:
        errands.append(errand)
    monkeypatch.setattr(prompt_jobs, "Detokenizer", lambda *args: None)
    return await PromptJobs(tokenizer, services).run(jobs, errand)


async def digests_of(monkeypatch: pytest.MonkeyPatch, *digests: str) -> tuple[list[str], int]:
    """Of the results, and how many prompts were not computed."""
    FakeSession.digests = list(digests)
    results = await run(monkeypatch, JOBS, FakeSession)
    return [result.model_digest for result in results], len(FakeSession.digests)


@pytest.mark.parametrize("digest", ["a", ""])
async def test_what_is_of_one_model_is_computed_once(
    monkeypatch: pytest.MonkeyPatch, digest: str
) -> None:
    told, num_left = await digests_of(monkeypatch, *[digest] * 6)
    assert (told, num_left) == ([digest] * 3, 3)


async def test_no_call_is_answered_of_two_models(monkeypatch: pytest.MonkeyPatch) -> None:
    told, num_left = await digests_of(monkeypatch, "a", "a", "b", "b", "b", "b")
    assert (told, num_left) == (["b"] * 3, 0)


async def test_where_weights_are_replaced_again_and_again_the_client_asks_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ModelChangedError, match=r"^models of different digests .*: ask anew$"):
        await digests_of(monkeypatch, "a", "a", "b", "b", "b", "a")


class Failing(FakeSession):
    """A worker takes those of three tokens or more; none is answered."""

    def __init__(self, request_id: str, request: Any, builder: Any, *args: Any, **options: Any):
        super().__init__(request_id, request, builder, *args, **options)
        self._num_tokens, self._builder = len(request.shape.prompt_ids), builder

    async def next_event(self) -> None:
        if self._num_tokens < 3:
            await asyncio.sleep(3600)
        self._builder.placed()
        raise DeadlineExceededError("the deadline passed")


async def test_tokens_of_which_a_worker_was_asked_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    FakeSession.digests = ["a"] * 3
    wanted = WantedLogprobs(1, 2, 1)
    jobs = [Job((1,) * num, wanted) for num in (2, 3, 9)]
    errands: list[Errand] = []
    with pytest.raises(DeadlineExceededError):
        await run(monkeypatch, jobs, Failing, errands)
    assert errands[0].num_placed_tokens == 3


class Open(FakeSession):
    """Is answered when all have had a turn; a prompt of one token is what no worker takes."""

    num_open = 0
    most_open = 0

    def __init__(self, request_id: str, request: Any, *args: Any, **options: Any) -> None:
        self.model_digest, self.usage = "a", SimpleNamespace(num_cached_tokens=0)
        self._num_tokens = len(request.shape.prompt_ids)

    def start(self) -> None:
        Open.num_open += 1
        Open.most_open = max(Open.most_open, Open.num_open)

    async def next_event(self) -> None:
        await asyncio.sleep(0)
        if self._num_tokens == 1:
            raise DeadlineExceededError("the deadline passed")

    def close(self) -> None:
        Open.num_open -= 1


@pytest.mark.parametrize("fails", [False, True])
async def test_few_of_a_call_are_asked_for_at_once_and_none_is_left_open(
    monkeypatch: pytest.MonkeyPatch, *, fails: bool
) -> None:
    monkeypatch.setattr(Open, "most_open", 0)
    jobs = [Job((1, 2), WantedStates(1))] * 60
    if fails:
        with pytest.raises(DeadlineExceededError):
            await run(monkeypatch, [*jobs, JOBS[2]], Open)
    else:
        assert len(await run(monkeypatch, jobs, Open)) == 60
    assert (Open.num_open, Open.most_open) == (0, 16)


class Counted(TokenLogprobs):
    """Knows how many of its kind there are."""

    num_alive = 0

    def __new__(cls, token_id: int) -> "Counted":
        Counted.num_alive += 1
        return super().__new__(cls, -0.5, (token_id,), (-0.5,))

    def __del__(self) -> None:
        Counted.num_alive -= 1


class Telling(FakeSession):
    """Tells of a prompt in two parts; likeliest is always the token before."""

    most_alive = 0

    def __init__(self, request_id: str, request: Any, *args: Any, **options: Any) -> None:
        self.model_digest, self.usage = "a", SimpleNamespace(num_cached_tokens=0)
        token_ids, wanted = request.shape.prompt_ids, request.shape.told
        half = (wanted.first_position + wanted.end_position) // 2
        self._parts = [
            (at, token_ids[at - 1 : end - 1])
            for at, end in ((wanted.first_position, half), (half, wanted.end_position))
        ]

    async def next_event(self) -> PromptLogprobs | None:  # type: ignore[override]
        if not self._parts:
            return None
        at, token_ids = self._parts.pop(0)
        told = PromptLogprobs(at, tuple(map(Counted, token_ids)))
        Telling.most_alive = max(Telling.most_alive, Counted.num_alive)
        return told


async def test_of_what_was_told_only_numbers_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of continuations wait for the last: objects would be hundreds of megabytes."""
    alike, falling = (7,) * 64, tuple(range(64, 0, -1))
    partly = falling[:32] + alike[:32]
    jobs = [
        Job(ids, WantedLogprobs(4, 64, 1)) for ids in (alike, falling, partly) for _ in range(50)
    ]
    results = await run(monkeypatch, jobs, Telling)
    assert Telling.most_alive < 2 * 64
    assert Counted.num_alive == 0
    assert [result.is_greedy for result in results] == [True] * 50 + [False] * 100
    assert all(list(result.logprobs) == [-0.5] * 60 for result in results)
    assert {result.logprobs.itemsize for result in results} == {4}


@pytest.mark.parametrize(("max_queue", "most_open"), [(0, 1), (2, 3), (15, 16), (256, 16)])
async def test_a_call_alone_asks_for_no_more_at_once_than_may_wait(
    monkeypatch: pytest.MonkeyPatch, max_queue: int, most_open: int
) -> None:
    """Else it is refused for want of room by itself, however often its client comes back."""
    monkeypatch.setattr(Open, "most_open", 0)
    jobs = [Job((1, 2), WantedStates(1))] * 60
    assert len(await run(monkeypatch, jobs, Open, max_queue=max_queue)) == 60
    assert Open.most_open == most_open
