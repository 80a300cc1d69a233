"""Arguments of calls in earlier turns: of how many, together, a request may have."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from diptych.errors import InvalidRequestError
from diptych.text.chat_template import Message, ToolCall
from router.frontend import validation
from router.frontend.http.asked import Envelope
from router.frontend.http.chat_request import read_chat
from router.frontend.http.response_request import read_response
from router.frontend.tools import MAX_ARGUMENT_BYTES, MAX_ARGUMENT_VALUES
from router.generation.request import ChatPrompt, GenerationRequest
from tests.unit.router.frontend.asked import chat, facts, read

ENVELOPE = Envelope(request_id="r", num_bytes=9, max_model_len=100)
FILE = "a[0], {b: 'c'},\n"
NO_JSON = "{"


def by_chat(*texts: str) -> GenerationRequest:
    """In turns of two calls."""
    calls = [{"function": {"name": "f", "arguments": text}} for text in texts]
    turns = [
        {"role": "assistant", "tool_calls": calls[at : at + 2]} for at in range(0, len(calls), 2)
    ]
    return read_chat({"model": "m", "messages": turns}, ENVELOPE).request


def by_response(*texts: str) -> GenerationRequest:
    call = {"type": "function_call", "call_id": "1", "name": "f"}
    items = [{**call, "arguments": text} for text in texts]
    return read_response({"model": "m", "input": items}, ENVELOPE).request


def by_grpc(*texts: str) -> GenerationRequest:
    asked = chat(*[("assistant", "")] * len(texts))
    for turn, text in zip(asked.chat.messages, texts, strict=True):
        turn.tool_calls.add(id="1", name="f", arguments=text)
    return read(asked)


ways = pytest.mark.parametrize(
    ("ask", "field"),
    [(by_chat, "messages"), (by_response, "input"), (by_grpc, "chat.messages")],
)


def arguments_of(request: GenerationRequest) -> list[Mapping[str, Any]]:
    assert isinstance(request.prompt, ChatPrompt)
    return [call.arguments for turn in request.prompt.messages for call in turn.tool_calls]


@ways
def test_whole_files_fit(ask: Callable[..., GenerationRequest], field: str) -> None:
    """Whatever they hold, each is one value."""
    written = [{"path": "p", "text": FILE * (MAX_ARGUMENT_BYTES // len(FILE) // 3 - 2000)}] * 3
    texts = list(map(json.dumps, written))
    assert sum(text.count(",") for text in texts) > MAX_ARGUMENT_VALUES
    assert arguments_of(ask(*texts)) == written


@ways
@pytest.mark.parametrize("value", ["7", "-1e999", "[]", "{}", '""', r'"\ud800"'])
def test_more_values_than_all_calls_may_have_are_not_made(
    ask: Callable[..., GenerationRequest], field: str, value: str
) -> None:
    """Nothing is read until all were counted: else the first call would be what is wrong."""
    num = MAX_ARGUMENT_VALUES // (4 if value in ("[]", "{}") else 2)  # these may hold one each
    half = f'{{"a": [{",".join([value] * num)}]}}'
    assert len(arguments_of(ask(half))) == 1
    with pytest.raises(InvalidRequestError, match=r"more than [0-9]* values") as caught:
        ask(NO_JSON, half, half)
    assert caught.value.field == field


@ways
def test_more_bytes_than_all_calls_may_have_are_not_read(
    ask: Callable[..., GenerationRequest], field: str
) -> None:
    half = json.dumps({"a": "ä" * (MAX_ARGUMENT_BYTES // 4)}, ensure_ascii=False)
    assert len(arguments_of(ask(half))) == 1
    with pytest.raises(InvalidRequestError, match=r"more than [0-9]* bytes") as caught:
        ask(NO_JSON, half, half)
    assert caught.value.field == field


class _Unseen(Mapping[str, Any]):
    """Nobody may look at what is in it."""

    def __getitem__(self, name: str) -> Any:
        raise AssertionError(name)

    def __iter__(self) -> Iterator[str]:
        raise AssertionError

    def __len__(self) -> int:
        raise AssertionError


def test_what_was_read_is_not_looked_through_again() -> None:
    message = Message("assistant", "", (ToolCall("1", "f", _Unseen()),))
    request = GenerationRequest(prompt=ChatPrompt((message,)), num_bytes=1)
    validation.check(request, facts())
