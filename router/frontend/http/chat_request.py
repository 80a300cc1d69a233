"""The body of ``/v1/chat/completions`` as a request for the generator. Pure."""

from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, FailFast, Field

from diptych.errors import InvalidRequestError
from diptych.text.chat_template import Message
from router.frontend.http import unserved
from router.frontend.http.asked import (
    Asked,
    Envelope,
    GenerationBody,
    asked_of,
)
from router.frontend.http.body import StrictModel, validated
from router.frontend.http.constraint_fields import read_constraint
from router.frontend.http.sampling_fields import read_sampling
from router.frontend.validation import MAX_MESSAGES, MAX_PARTS
from router.generation.request import ChatPrompt, GenerationRequest

# What a role is called in the model's template.
_ROLES: Final[Mapping[str, str]] = {
    "system": "system",
    "developer": "system",  # OpenAI's newer name
    "user": "user",
    "assistant": "assistant",
}
CHAT_NAMES: Final = {
    "chat.template_arguments": "chat_template_kwargs",
    "chat.messages": "messages",
    "chat": "messages",
}


class _Part(StrictModel):
    """A piece of a message's content."""

    type: str
    text: str | None = None


def _as_parts(value: object) -> object:
    """A text is one part."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise ValueError("should be a text or a list of parts")
    return value


class _Turn(StrictModel):
    role: str
    content: Annotated[
        list[_Part], FailFast(), Field(max_length=MAX_PARTS), BeforeValidator(_as_parts)
    ]


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
    names = {**CHAT_NAMES, **(said.names if said else {}), "sampling.logprobs": "top_logprobs"}
    if body.max_completion_tokens is not None:  # the older name counts where it stands alone
        content = {**content, "max_tokens": body.max_completion_tokens}
        names["sampling.max_tokens"] = "max_completion_tokens"
    content = {**content, "logprobs": _num_logprobs(body)}
    request = GenerationRequest(
        prompt=read_messages(content),
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


def read_messages(content: Mapping[str, object]) -> ChatPrompt:
    """The messages, and what else the model's template is told. Raises InvalidRequestError."""
    _refuse_in_messages(content.get("messages"))
    read = validated(ChatMessages, content)
    num_parts = sum(len(turn.content) for turn in read.messages)
    if num_parts > MAX_PARTS:
        raise InvalidRequestError(
            f"have {num_parts} parts, more than {MAX_PARTS}", field="messages"
        )
    messages = tuple(
        Message(
            role=_read_role(turn.role, f"messages[{index}].role"),
            content=_read_content(turn.content, f"messages[{index}].content"),
        )
        for index, turn in enumerate(read.messages)
    )
    return ChatPrompt(messages, read.chat_template_kwargs or {})


def _refuse_in_messages(messages: object) -> None:
    if not isinstance(messages, list):
        return
    for index, turn in enumerate(messages[:MAX_MESSAGES]):
        if isinstance(turn, dict):
            unserved.refuse(turn, unserved.OF_MESSAGE, f"messages[{index}]")


def _read_role(role: str, path: str) -> str:
    if role in _ROLES:
        return _ROLES[role]
    if role in ("tool", "function"):
        raise InvalidRequestError(f"{role} is not supported yet", field=path)
    raise InvalidRequestError(f"should be one of {', '.join(_ROLES)}", field=path)


def _read_content(parts: list[_Part], path: str) -> str:
    texts = []
    for index, part in enumerate(parts):
        if part.type != "text":
            raise InvalidRequestError("only text is supported", field=f"{path}[{index}].type")
        if part.text is None:
            raise InvalidRequestError("is required", field=f"{path}[{index}].text")
        texts.append(part.text)
    return "".join(texts)
