"""What routes tell of prompts, beside workers that are a function."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.routing import Route

from router.frontend.http.exchange import BodyRoom
from router.frontend.http.posted import Posted
from router.frontend.http.prompt_work import PromptRoutes
from router.generation.answer import Usage
from router.generation.prompt_work import ContinuationScore, Scores


class Prompts:
    """The first token of each continuation is none that the model would ever say."""

    @contextmanager
    def answering(self, *given: object) -> Iterator[None]:
        yield

    async def score(self, call: None) -> Scores:
        found = ContinuationScore((-math.inf, -0.5), is_greedy=False)
        usage = Usage(num_prompt_tokens=2, num_output_tokens=0, num_cached_tokens=0)
        return Scores((found,), usage)


async def test_a_score_is_json_however_unlikely_the_tokens() -> None:
    admission: Any = SimpleNamespace(max_model_len=9, model=SimpleNamespace(name="m"))
    prompts: Any = Prompts()
    room = BodyRoom(1000, 1000, 5.0)
    route = Posted(PromptRoutes(admission, prompts).score, room)
    transport = httpx.ASGITransport(Starlette(routes=[Route("/score", route, methods=["POST"])]))
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        answer = await client.post("/score", json={"continuations": ["a b"]})
    (told,) = answer.json()["data"]
    assert "Infinity" not in answer.text
    assert (told["score"], told["logprobs"]) == (-9999.5, [-9999.0, -0.5])
