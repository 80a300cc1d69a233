"""A chat in a file: messages as OpenAI's API takes them, so that any client goes on with it."""

import json
import os
import secrets
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from diptych.client import ChatMessage
from diptych.errors import InvalidRequestError
from diptych.v1 import inference_pb2


class _Function(BaseModel):
    name: str
    arguments: str


class _Call(BaseModel):
    id: str
    type: str = "function"
    function: _Function


class _Message(BaseModel):
    role: str
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # as others call it
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None


class _Chat(BaseModel):
    model_config = ConfigDict(extra="ignore")

    messages: list[_Message]


def save(path: Path, turns: Sequence[ChatMessage]) -> None:
    """Write the turns of a chat, in place of what the file had. Raises InvalidRequestError.

    The file has what it had where that fails.
    """
    messages = [_written(turn).model_dump(exclude_none=True) for turn in turns]
    text = json.dumps({"messages": messages}, ensure_ascii=False, indent=1)
    try:
        _replace(Path(os.path.realpath(path)), f"{text}\n")  # a link stays one
    except (OSError, ValueError) as error:
        raise _refusal(path, error) from None


def _replace(path: Path, text: str) -> None:
    """Have ``text`` in a file; where this raises, what it had and nothing beside it."""
    beside = path.parent / f".{secrets.token_hex(8)}.new"
    beside.touch(exist_ok=False)
    try:
        with suppress(FileNotFoundError):
            shutil.copymode(path, beside)  # who may read it stays as it was
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except BaseException:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def load(path: Path) -> list[ChatMessage]:
    """The turns of a chat that was saved. Raises InvalidRequestError."""
    try:
        chat = _Chat.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        problem = f"{where}: {first['msg']}" if where else first["msg"]
        raise InvalidRequestError(problem, field=str(path)) from None
    except (OSError, ValueError) as error:
        raise _refusal(path, error) from None
    return [_read(message) for message in chat.messages]


def _refusal(path: Path, error: OSError | ValueError) -> InvalidRequestError:
    said = error.strerror if isinstance(error, OSError) else None
    return InvalidRequestError(said or str(error), field=str(path))


def _written(turn: ChatMessage) -> _Message:
    calls = [
        _Call(id=call.id, function=_Function(name=call.name, arguments=call.arguments))
        for call in turn.tool_calls
    ]
    return _Message(
        role=turn.role,
        content=turn.content,
        reasoning_content=turn.reasoning or None,
        tool_calls=calls or None,
        tool_call_id=turn.tool_call_id or None,
    )


def _read(message: _Message) -> ChatMessage:
    calls = [
        inference_pb2.ToolCall(
            id=call.id, name=call.function.name, arguments=call.function.arguments
        )
        for call in message.tool_calls or ()
    ]
    return ChatMessage(
        message.role,
        message.content or "",
        calls,
        message.tool_call_id or "",
        message.reasoning_content or message.reasoning or "",
    )
