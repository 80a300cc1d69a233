"""Calls of tools in a chat: each has an answer before the next turn, whatever ends the line."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from diptych.cli import chat
from diptych.cli.chat import _Chat
from diptych.cli.conversation import Conversation
from diptych.client import Chunk, DiptychClient, SamplingOptions
from diptych.errors import NoWorkerError
from diptych.v1 import inference_pb2

CALLS = [inference_pb2.ToolCall(id=each, name="clock", arguments="{}") for each in "12"]
UNANSWERED = "There is no answer."


@pytest.fixture
def conversation() -> Conversation:
    return Conversation("m", "", SamplingOptions())


@pytest.fixture
def talking(conversation: Conversation) -> _Chat:
    runner: Any = SimpleNamespace(run=lambda answer: answer())
    client: Any = None
    return _Chat(runner, client, conversation, None)


def reading(lines: Iterator[str], ends: type[BaseException]) -> Callable[[str], str]:
    """A terminal with these lines, which ``ends`` so behind them."""

    def read(prompt: str) -> str:
        line = next(lines, None)
        if line is None:
            raise ends
        return line

    return read


def answers(conversation: Conversation) -> list[tuple[str, str]]:
    """What the calls came to, as the model is told."""
    turns = conversation.request("now").chat.messages
    assert [turn.role for turn in turns] == ["user", "assistant", "tool", "tool", "user"]
    return [(turn.tool_call_id, turn.content[0].text) for turn in turns if turn.role == "tool"]


def test_calls_of_an_answer_that_failed_have_none(
    conversation: Conversation, talking: _Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    def show(*_: object, write_call: Callable[[object], None], **__: object) -> Callable[[], None]:
        def fail() -> None:
            for call in CALLS:
                write_call(call)
            raise NoWorkerError("gone")

        return fail

    monkeypatch.setattr(chat, "show_answer", show)
    with pytest.raises(NoWorkerError):
        talking._answer("hi")
    assert answers(conversation) == [("1", UNANSWERED), ("2", UNANSWERED)]


@pytest.mark.parametrize("text", ["b", ""])
def test_what_was_thought_is_shown_and_told_again(
    text: str,
    conversation: Conversation,
    talking: _Chat,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Apart from the answer; where there is none that is said."""

    async def stream(*_: object) -> AsyncIterator[Chunk]:
        told: list[dict[str, Any]] = [{"reasoning": "a"}, {"reasoning": "\n"}, {"text": text}]
        for said in told:
            yield Chunk(request_id="r", model="m", seed=0, **said)

    talking._client = cast(DiptychClient, SimpleNamespace(stream=stream))
    with asyncio.Runner() as runner:
        talking._runner = runner
        assert not talking._answer("hi")
    shown = capsys.readouterr()
    assert shown.out == (f"{text}\n" if text else "")
    assert shown.err.startswith("a\n\n")
    assert ("within its thoughts" in shown.err) == (not text)
    request = conversation.request("now")
    assert request.chat.split_reasoning
    turns = [(turn.role, turn.reasoning) for turn in request.chat.messages]
    assert turns == ([("user", ""), ("assistant", "a")] if text else []) + [("user", "")]


def test_a_text_of_several_lines_is_one(talking: _Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(['"""a', "", " b", 'c"""', '"""one"""', '"""cut', "off"])
    said: list[str] = []
    monkeypatch.setattr("builtins.input", reading(lines, EOFError))
    monkeypatch.setattr(talking, "_answer", said.append)
    talking.run()
    assert said == ["a\n\n b\nc", "one", "cut\noff"]


@pytest.mark.parametrize("ends", [KeyboardInterrupt, EOFError])
def test_who_stops_amid_the_calls_has_answered_the_rest_so(
    conversation: Conversation,
    talking: _Chat,
    monkeypatch: pytest.MonkeyPatch,
    ends: type[BaseException],
) -> None:
    monkeypatch.setattr("builtins.input", reading(iter(["noon"]), ends))
    conversation.answered("hi", "", None, CALLS)
    with pytest.raises(ends):
        talking._answer_calls(CALLS)
    assert answers(conversation) == [("1", "noon"), ("2", UNANSWERED)]
