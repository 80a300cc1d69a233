"""Answers of a router that is about to end close their connections; others do not."""

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Message

from router.frontend.http.leaving import Leaving


@pytest.mark.parametrize("is_serving", [True, False])
async def test_an_answer_says_whether_to_come_back(is_serving: bool) -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError("nothing is read")

    answer = PlainTextResponse("hello", headers={"connection": "keep-alive"})
    await Leaving(answer, lambda: is_serving)({"type": "http"}, receive, send)
    said = dict(sent[0]["headers"])[b"connection"]
    assert said == (b"keep-alive" if is_serving else b"close")
    assert sent[1]["body"] == b"hello"
