"""A chat's answer as OpenAI's JSON: a message, or what is added to one. Pure."""

from collections.abc import Mapping, Sequence
from typing import Final

from router.frontend.http.answer_form import Form, Progress
from router.frontend.http.logprob_form import ChatLogprobs
from router.generation.answer import CalledTool, Said


def _message_of(said: Said) -> Mapping[str, object]:
    """The whole message; without a text its content is null beside calls."""
    content = None if said.tool_calls and not said.text else said.text
    message: dict[str, object] = {"role": "assistant", "content": content}
    message |= {"refusal": None, "annotations": []}
    if said.reasoning:
        message |= _thought(said)
    if said.tool_calls:
        message["tool_calls"] = [_begun(call, call.arguments) for call in said.tool_calls]
    return {"message": message}


def _deltas_of(said: Said, before: Progress) -> Sequence[Mapping[str, object]]:
    """Of each call its id and name come once, then its arguments."""
    delta: dict[str, object] = {}
    if not before.is_begun:
        delta = {"role": "assistant", "content": said.text}
    elif said.text:
        delta = {"content": said.text}
    if said.reasoning:
        delta |= _thought(said)
    pieces = [delta] if delta or not said.tool_calls else []
    for index, call in enumerate(said.tool_calls, before.num_calls):
        rest = {"function": {"arguments": call.arguments}}
        pieces.append({"tool_calls": [{"index": index, **_begun(call, "")}]})
        pieces.append({"tool_calls": [{"index": index, **rest}]})
    return [{"delta": piece} for piece in pieces]


def _thought(said: Said) -> Mapping[str, object]:
    """By both names: clients look for one or the other."""
    return {"reasoning_content": said.reasoning, "reasoning": said.reasoning}


def _begun(call: CalledTool, arguments: str) -> Mapping[str, object]:
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.call_id, "type": "function", "function": function}


CHAT: Final = Form(
    operation="chat",
    id_prefix="chatcmpl-",
    whole="chat.completion",
    chunk="chat.completion.chunk",
    whole_of=_message_of,
    pieces_of=_deltas_of,
    has_prompt_in_choice=False,
    logprobs_of=ChatLogprobs,
)
