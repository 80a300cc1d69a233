"""What is computed of several prompts for one call, while weights are replaced."""

from types import SimpleNamespace
from typing import Any

import pytest

from diptych.errors import ModelChangedError
from router.frontend import prompt_jobs
from router.frontend.prompt_jobs import Errand, Job, PromptJobs
from router.placement.claim import NO_CLAIM
from router.request.prompt_told import WantedStates

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


async def digests_of(monkeypatch: pytest.MonkeyPatch, *digests: str) -> tuple[list[str], int]:
    """Of the results, and how many prompts were not computed."""
    FakeSession.digests = list(digests)
    monkeypatch.setattr(prompt_jobs, "Session", FakeSession)
    observer: Any = None
    tokenizer: Any = SimpleNamespace(decoder=lambda *args: None)
    services: Any = SimpleNamespace(config=SimpleNamespace(client_buffer_messages=8))
    errand = Errand("r", b"", None, observer, NO_CLAIM)
    monkeypatch.setattr(prompt_jobs, "Detokenizer", lambda *args: None)
    results = await PromptJobs(tokenizer, services).run(JOBS, errand)
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
    with pytest.raises(ModelChangedError, match="ask anew"):
        await digests_of(monkeypatch, "a", "a", "b", "b", "b", "a")
