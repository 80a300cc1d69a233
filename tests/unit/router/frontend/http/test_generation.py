"""How the answer to a generation ends when it fails while the client is being written to."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any, cast

from diptych.errors import DiptychError, NoWorkerError, SlowClientError
from router.frontend.admission import Admission
from router.frontend.generator import Generator
from router.frontend.http.answer_form import COMPLETION
from router.frontend.http.completion_request import read_completion
from router.frontend.http.exchange import BodyRoom
from router.frontend.http.generation import GenerationAnswers
from router.frontend.http.posted import Posted
from router.generation.answer import Delta, GenerationEvent

ADMISSION = SimpleNamespace(model=SimpleNamespace(name="m"), max_model_len=100)


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

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.num_given_up = 0
        self._body = [{"type": "http.request", "body": b'{"model":"m","prompt":"p","stream":true}'}]

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


async def answered(error: DiptychError) -> Behind:
    answers = GenerationAnswers(
        cast(Admission, ADMISSION), cast(Generator, Failing(error)), read_completion, COMPLETION
    )
    client = Behind()
    scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
    route = Posted(answers, BodyRoom(100, 100, 30.0))
    await route(scope, client.receive, client.send)  # type: ignore[arg-type]
    assert client.num_given_up == 1
    return client


async def test_a_client_that_is_merely_behind_is_told_what_failed() -> None:
    client = await answered(NoWorkerError("gone"))
    told, end, _ = client.sent[-1]["body"].decode().split("\n\n")
    assert json.loads(told.removeprefix("data: "))["error"]["code"] == "no_worker"
    assert (end, client.sent[-1]["more_body"]) == ("data: [DONE]", False)


async def test_a_client_that_takes_nothing_is_told_nothing() -> None:
    assert len((await answered(SlowClientError("full"))).sent) == 2
