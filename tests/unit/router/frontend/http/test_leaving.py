"""Answers of a router that is about to end close their connections; others do not."""

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

from router.frontend.http.exchange import Exchange
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


async def test_of_a_stream_applications_on_its_way_see_the_head_alone() -> None:
    sent: list[Message] = []
    seen: list[str] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError("nothing is read")

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        async def see(message: Message) -> None:
            seen.append(message["type"])
            await send(message)

        exchange = Exchange(scope, receive, see)
        for _ in range(3):
            await exchange.send_piece(b"token")
        await exchange.end_stream()

    await Leaving(stream, lambda: True)({"type": "http", "headers": []}, receive, send)
    assert seen == ["http.response.start"]
    assert [message.get("body") for message in sent] == [None, *3 * [b"token"], b""]
