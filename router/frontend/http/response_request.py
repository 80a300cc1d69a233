"""The body of ``/v1/responses`` as a request for the generator. Pure.

Nothing is stored: what needs a response of before, or wants this one kept, is refused.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, FailFast, Field

from diptych.errors import InvalidRequestError
from router.frontend.http import unserved
from router.frontend.http.asked import COMMON_NAMES, Asked, Envelope, LevelFields, ModelName
from router.frontend.http.body import as_list, validated
from router.frontend.http.constraint_fields import read_text_constraint
from router.frontend.http.response_input import read_input
from router.frontend.http.sampling_fields import read_sampling
from router.frontend.http.tool_fields import ToolSyntax, read_tools
from router.frontend.tools import MAX_TOOL_BYTES
from router.generation.request import GenerationRequest

_LOGPROBS: Final = "message.output_text.logprobs"
# Beside log probabilities they tell of tools that are not here, or of what is told in any case.
_INCLUDABLE: Final = frozenset(
    {
        _LOGPROBS,
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
_MAX_PAIRS: Final = 16
# What is said again as it came, members that nobody knows too; beside it only the prompt's text.
_REPEATED_WHOLE: Final = ("tools", "tool_choice", "text")
_MAX_REPEATED_BYTES: Final = 2 * MAX_TOOL_BYTES
_UNSAID: Final[Mapping[object, Mapping[str, object]]] = {
    "function": {"description": None, "parameters": None, "strict": None},
    "json_schema": {"description": None, "strict": False},
}
_Key = Annotated[str, Field(max_length=64)]
_Value = Annotated[str, Field(max_length=512)]
_NAMES: Final = {
    "chat.template_arguments": "chat_template_kwargs",
    "sampling.logprobs": "top_logprobs",
}


class _ResponseBody(LevelFields):
    """A response's members beside its input, its tools and its sampling parameters."""

    model: ModelName
    stream: bool | None = None
    cache_salt: str | None = None
    return_timing: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include: Annotated[list[str], FailFast(), Field(max_length=64), BeforeValidator(as_list)] = (
        Field(default_factory=list)
    )
    max_output_tokens: int | None = None
    metadata: Annotated[dict[_Key, _Value], Field(max_length=_MAX_PAIRS)] | None = None
    prompt_cache_key: _Key | None = None
    reasoning: dict[str, Any] | None = None
    safety_identifier: _Key | None = None
    top_logprobs: int | None = None


def read_response(content: Mapping[str, object], envelope: Envelope) -> Asked:
    """What a client asks for. Raises InvalidRequestError."""
    body = validated(_ResponseBody, content)
    unserved.refuse(content, unserved.OF_RESPONSE, elsewhere=unserved.SAID_IN_RESPONSE)
    unserved.refuse(body.reasoning or {}, unserved.OF_REASONING, "reasoning")
    said = read_text_constraint(content)
    tools = read_tools(content, ToolSyntax.FLAT)
    chat = read_input(content)
    names = {**tools.names, **_NAMES, **chat.names, **(said.names if said else {})}
    sampled = {**content, "logprobs": _num_logprobs(body)}
    if body.max_output_tokens is not None:
        if content.get("max_tokens") not in (None, body.max_output_tokens):
            raise InvalidRequestError("differs from max_output_tokens", field="max_tokens")
        sampled["max_tokens"] = body.max_output_tokens
        names["sampling.max_tokens"] = "max_output_tokens"
    request = GenerationRequest(
        prompt=tools.prompt(chat.messages, body.chat_template_kwargs),
        sampling=read_sampling(sampled, constraint=None if said is None else said.constraint),
        model=body.model,
        request_id=envelope.request_id,
        cache_salt=body.cache_salt or "",
        level=body.level,
        num_bytes=envelope.num_bytes,
    )
    return Asked(
        request=request,
        is_stream=bool(body.stream),
        includes_usage=True,
        counts_along=False,
        tells_timing=bool(body.return_timing),
        prompt=None,
        names={**names, **COMMON_NAMES},
        repeated=_repeated(content, body),
    )


def _num_logprobs(body: _ResponseBody) -> int | None:
    """Of how many likeliest tokens; None: nobody asks for log probabilities."""
    for index, name in enumerate(body.include):
        if name not in _INCLUDABLE:
            raise InvalidRequestError("is not known", field=f"include[{index}]")
    if _LOGPROBS in body.include:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequestError(f"needs {_LOGPROBS} in include", field="top_logprobs")
    return None


def _repeated(content: Mapping[str, object], body: _ResponseBody) -> Mapping[str, object]:
    """The members of a response that are those of its request; what was not said by default.

    Raises InvalidRequestError: too long to be said again in several events, or with a number that
    is read as no finite one.
    """
    _check_repeated(content)
    tools: Any = content.get("tools") or ()  # they were read
    text = content.get("text")
    format_ = text.get("format") if isinstance(text, dict) else None
    return {
        "instructions": content.get("instructions"),
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": content.get("parallel_tool_calls") is not False,
        "prompt_cache_key": body.prompt_cache_key,
        "safety_identifier": body.safety_identifier,
        "text": {"format": _whole(format_ or {"type": "text"})},
        "tool_choice": content.get("tool_choice") or "auto",
        "tools": [_whole(tool) for tool in tools],
        "top_logprobs": body.top_logprobs or 0,
    }


def _whole(said: Mapping[str, object]) -> Mapping[str, object]:
    """With the members that clients look for, also where nobody said them."""
    return {**_UNSAID.get(said.get("type"), {}), **said}


def _check_repeated(content: Mapping[str, object]) -> None:
    num_bytes = 0
    for name in _REPEATED_WHOLE:
        try:
            said = json.dumps(content.get(name), ensure_ascii=False, allow_nan=False)
        except ValueError:
            raise InvalidRequestError(
                "has a number that cannot be said again", field=name
            ) from None
        num_bytes += len(said.encode())
        if num_bytes > _MAX_REPEATED_BYTES:
            raise InvalidRequestError(
                f"{', '.join(_REPEATED_WHOLE)} have more than {_MAX_REPEATED_BYTES} bytes, as JSON",
                field=name,
            )
