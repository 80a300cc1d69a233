"""What a client asks for, as the wire has it. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from diptych.client.json_struct import JSONValue, write_struct
from diptych.client.tools import Tools
from diptych.errors import InvalidRequestError
from diptych.sampling_params import (
    NOTHING_SAID,
    SamplingOptions,
    check_options,
    options_to_proto,
)
from diptych.service_level import NO_LEVEL, ServiceLevel
from diptych.v1 import inference_pb2


class ChatMessage(NamedTuple):
    """One turn of a conversation."""

    role: str  # system, user, assistant, tool, or what the model's template knows
    content: str
    tool_calls: Sequence[inference_pb2.ToolCall] = ()  # what the assistant called, as it came
    tool_call_id: str = ""  # which call a message of role tool answers
    reasoning: str = ""  # what the assistant thought before


def build_request(
    prompt: str | None = None,
    *,
    messages: Sequence[ChatMessage | tuple[str, str]] | None = None,
    token_ids: Sequence[int] | None = None,
    options: SamplingOptions = NOTHING_SAID,
    template_arguments: Mapping[str, JSONValue] | None = None,
    tools: Tools | None = None,
    split_reasoning: bool = False,
    emitted_token_ids: Sequence[int] = (),
    model_digest: str = "",
    now_unix_s: int = 0,
    return_prompt_token_ids: bool = False,
    model: str = "",
    request_id: str = "",
    cache_salt: str = "",
    level: ServiceLevel = NO_LEVEL,
) -> inference_pb2.GenerateRequest:
    """Make a request from exactly one of ``prompt``, ``messages`` and ``token_ids``.

    ``level`` is how urgent it is, and what it wants. ``emitted_token_ids`` is the output
    that an earlier call brought: the answer goes on after it, with the weights of
    ``model_digest`` if that is given, and where ``messages`` were rendered ``now_unix_s``.
    ``template_arguments``, ``tools`` and ``split_reasoning`` are for ``messages``, too. The rest
    is as in ``GenerateRequest`` in inference.proto.

    Raises InvalidRequestError: a text has half a character, or the wire has no such number.
    """
    if sum(given is not None for given in (prompt, messages, token_ids)) != 1:
        raise ValueError("give exactly one of prompt, messages and token_ids")
    if messages is None and (template_arguments or tools or split_reasoning or now_unix_s):
        raise ValueError(
            "template_arguments, tools, split_reasoning and now_unix_s are for messages"
        )
    with sayable():
        request = inference_pb2.GenerateRequest(
            model=model,
            sampling=_sampling(options),
            request_id=request_id,
            cache_salt=cache_salt,
            emitted_token_ids=emitted_token_ids,
            model_digest=model_digest,
            return_prompt_token_ids=return_prompt_token_ids,
        )
        level.write_to(request)
        if prompt is not None:
            request.text = prompt
        elif messages is not None:
            request.chat.CopyFrom(chat_prompt(messages))
            if template_arguments:
                write_struct(
                    template_arguments, request.chat.template_arguments, "template_arguments"
                )
            request.chat.split_reasoning = split_reasoning
            request.chat.now_unix_s = now_unix_s
            if tools is not None:
                tools.write_to(request.chat)
        elif token_ids is not None:
            request.tokens.SetInParent()
            request.tokens.ids.extend(token_ids)
    return request


def _sampling(options: SamplingOptions) -> inference_pb2.SamplingOptions:
    """Raises InvalidRequestError, which names what the wire has no room for: protobuf does not."""
    try:
        return options_to_proto(options)
    except ValueError:
        check_options(options, "sampling")
        raise


@contextmanager
def sayable() -> Iterator[None]:
    """Text that came from bytes that are none has halves of characters, which no message has.

    Raises InvalidRequestError.
    """
    try:
        yield
    except UnicodeEncodeError as error:
        reason = f"{error.object[error.start : error.end]!r} is no character"
        raise InvalidRequestError(reason, field="request") from None


def build_tokenize_request(
    text: str | None = None, *, messages: Sequence[ChatMessage | tuple[str, str]] | None = None
) -> inference_pb2.TokenizeRequest:
    """Make a request from exactly one of ``text`` and ``messages``.

    Raises InvalidRequestError: a text has half a character.
    """
    with sayable():
        if text is not None and messages is None:
            return inference_pb2.TokenizeRequest(text=text)
        if text is None and messages is not None:
            return inference_pb2.TokenizeRequest(chat=chat_prompt(messages))
    raise ValueError("give exactly one of text and messages")


def chat_prompt(messages: Sequence[ChatMessage | tuple[str, str]]) -> inference_pb2.ChatPrompt:
    """The turns of a conversation."""
    chat = inference_pb2.ChatPrompt()
    for turn in messages:
        said = ChatMessage(*turn)
        message = chat.messages.add(
            role=said.role,
            tool_calls=said.tool_calls,
            tool_call_id=said.tool_call_id,
            reasoning=said.reasoning,
        )
        if said.content or not said.tool_calls:
            message.content.add(text=said.content)
    return chat
