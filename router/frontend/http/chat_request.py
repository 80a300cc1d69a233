"""The body of ``/v1/chat/completions`` as a request for the generator. Pure."""

from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, FailFast, Field

from diptych.errors import InvalidRequestError
from diptych.text.chat_template import Message, ToolCall
from router.frontend.http import unserved
from router.frontend.http.asked import (
    Asked,
    Envelope,
    GenerationBody,
    asked_of,
)
from router.frontend.http.body import StrictModel, as_list, validated
from router.frontend.http.constraint_fields import read_constraint
from router.frontend.http.message_parts import Parts, read_text
from router.frontend.http.sampling_fields import read_sampling
from router.frontend.http.tool_fields import SaidTools, read_tools
from router.frontend.tools import check_arguments, read_arguments
from router.frontend.validation import MAX_MESSAGES, MAX_PARTS
from router.generation.request import ChatPrompt, GenerationRequest

# What a role is called in the model's template.
_ROLES: Final[Mapping[str, str]] = {
    "system": "system",
    "developer": "system",  # OpenAI's newer name
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
CHAT_NAMES: Final = {
    "chat.template_arguments": "chat_template_kwargs",
    "chat.messages": "messages",
    "chat": "messages",
}


class _CalledFunction(StrictModel):
    name: Annotated[str, Field(min_length=1)]
    arguments: str = ""


class _Call(StrictModel):
    """A call of a tool in an earlier turn."""

    id: str = ""
    function: _CalledFunction


class _Turn(StrictModel):
    role: str
    content: Parts = Field(default_factory=list)
    name: str | None = None
    tool_calls: Annotated[
        list[_Call], FailFast(), Field(max_length=MAX_PARTS), BeforeValidator(as_list)
    ] = Field(default_factory=list)
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChatMessages(StrictModel):
    """The part of a chat's body that becomes the prompt."""

    messages: Annotated[list[_Turn], FailFast(), Field(max_length=MAX_MESSAGES)]
    chat_template_kwargs: dict[str, Any] | None = None


class _ChatBody(GenerationBody):
    """A chat's other members of its own."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


def read_chat(content: Mapping[str, object], envelope: Envelope) -> Asked:
    """What a client asks for. Raises InvalidRequestError."""
    body = validated(_ChatBody, content)
    unserved.refuse(content, unserved.OF_CHAT)
    said = read_constraint(content)
    tools = read_tools(content)
    names = {**tools.names, **CHAT_NAMES, **(said.names if said else {})}
    names["sampling.logprobs"] = "top_logprobs"
    if body.max_completion_tokens is not None:  # the older name counts where it stands alone
        content = {**content, "max_tokens": body.max_completion_tokens}
        names["sampling.max_tokens"] = "max_completion_tokens"
    content = {**content, "logprobs": _num_logprobs(body)}
    request = GenerationRequest(
        prompt=read_messages(content, tools),
        sampling=read_sampling(content, constraint=None if said is None else said.constraint),
        model=body.model,
        request_id=envelope.request_id,
        cache_salt=body.cache_salt or "",
        level=body.level,
        num_bytes=envelope.num_bytes,
    )
    return asked_of(body, request, names)


def _num_logprobs(body: _ChatBody) -> int | None:
    """Of how many likeliest tokens, as the one parameter that says what a chat says with two."""
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequestError("needs logprobs to be true", field="top_logprobs")
    return None


def read_messages(content: Mapping[str, object], tools: SaidTools) -> ChatPrompt:
    """The messages, and what else the model's template is told. Raises InvalidRequestError."""
    _refuse_in_messages(content.get("messages"))
    read = validated(ChatMessages, content)
    num_parts = sum(len(turn.content) + len(turn.tool_calls) for turn in read.messages)
    if num_parts > MAX_PARTS:
        raise InvalidRequestError(
            f"have {num_parts} parts, more than {MAX_PARTS}", field="messages"
        )
    calls = [call.function.arguments for turn in read.messages for call in turn.tool_calls]
    check_arguments(calls, "messages")
    turns = (_read_turn(turn, f"messages[{index}]") for index, turn in enumerate(read.messages))
    return tools.prompt(tuple(turns), read.chat_template_kwargs)


def _read_turn(turn: _Turn, path: str) -> Message:
    role = _read_role(turn.role, f"{path}.role")
    calls = []
    for index, call in enumerate(turn.tool_calls):
        at = f"{path}.tool_calls[{index}].function.arguments"
        arguments = read_arguments(call.function.arguments, at)
        calls.append(ToolCall(call.id, call.function.name, arguments))
    return Message(
        role=role,
        content=read_text(turn.content, f"{path}.content", of_model=role == "assistant"),
        tool_calls=tuple(calls),
        tool_call_id=turn.tool_call_id or "",
        reasoning=turn.reasoning_content or turn.reasoning or "",
        name=turn.name or "",
    )


def _refuse_in_messages(messages: object) -> None:
    if not isinstance(messages, list):
        return
    for index, turn in enumerate(messages[:MAX_MESSAGES]):
        if isinstance(turn, dict):
            path = f"messages[{index}]"
            unserved.refuse(turn, unserved.OF_MESSAGE, path)
            if turn.get("content") is None and not any(map(turn.get, _instead(turn))):
                raise InvalidRequestError("is required", field=f"{path}.content")


def _instead(turn: Mapping[str, object]) -> tuple[str, ...]:
    """What a turn may say without a content."""
    if turn.get("role") == "assistant":
        return ("tool_calls", "reasoning_content", "reasoning")
    return ("tool_calls",)


def _read_role(role: str, path: str) -> str:
    if role in _ROLES:
        return _ROLES[role]
    if role == "function":  # what tools were called before
        raise InvalidRequestError("function is not supported", field=path)
    raise InvalidRequestError(f"should be one of {', '.join(_ROLES)}", field=path)
